"""`spheret report`: table, plots and HTML from a folder that `compare` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spheret.cli.console import output, say
from spheret.reporting import load_results, markdown, print_table, write_report


@dataclass(frozen=True)
class ReportCommand:
    """Rebuild table, plots and report.html of a comparison from its folder.

    Example: spheret report runs/first --figures figures/
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder that `spheret compare` wrote."""
    figures: Path | None = None
    """Also save every figure there, as .svg and .png."""
    markdown: bool = False
    """Print the table as Markdown, to paste."""


def run(command: ReportCommand) -> int:
    """Print the table and write the report."""
    console = output()
    results = load_results(command.folder)
    if command.markdown:
        print(markdown(results))
    else:
        print_table(console, results)
        say(console)
        say(console, results["verdict"])
        say(console)
    report = write_report(command.folder, partial=True, figures=command.figures)
    say(console, f"Report: {report}", to_copy=True)
    return 0
