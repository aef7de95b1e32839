"""`spheret report`: table, plots and HTML from a folder that `compare` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from spheret.reporting import load_results, markdown, rich_table, write_report


@dataclass(frozen=True)
class ReportCommand:
    """Rebuild table, plots and report.html of a comparison from its folder.

    Example: spheret report runs/compare --figures figures/
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder that `spheret compare` wrote."""
    figures: Path | None = None
    """Also save every figure there, as .svg and .png."""
    markdown: bool = False
    """Print the table as Markdown, to paste."""


def run(command: ReportCommand) -> int:
    """Write the report and print the table."""
    console = Console()
    report = write_report(command.folder, partial=True, figures=command.figures)
    results = load_results(command.folder)
    if command.markdown:
        print(markdown(results))
    else:
        console.print(rich_table(results))
        console.print(results["verdict"], markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {report}", highlight=False, soft_wrap=True)
    return 0
