"""From the folder of a comparison to results.csv and report.html beside its results.json."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spheret.reporting.collect import Comparison, load_comparison
from spheret.reporting.curves import run_plots
from spheret.reporting.html import render_html
from spheret.reporting.plots import result_plots
from spheret.reporting.style import Plot
from spheret.reporting.table import csv_text

REPORT_NAME = "report.html"
CSV_NAME = "results.csv"


def write_report(folder: Path, *, partial: bool = False, figures: Path | None = None) -> Path:
    """Writes results.csv and report.html into the folder of a comparison; returns the path of report.html.

    partial: build it although run folders are missing (they are named in the report).
    figures: also save every figure there, as .svg and .png.

    Raises FileNotFoundError without results.json or with a run folder missing, ValueError for results of another
    format, ImportError naming the extra where matplotlib or jinja2 is absent.
    """
    comparison = load_comparison(Path(folder), partial=partial)
    plots = all_plots(comparison)
    if figures is not None:
        save_plots(plots, figures)
    report = comparison.folder / REPORT_NAME
    _write_atomically(comparison.folder / CSV_NAME, csv_text(comparison.results).encode())
    _write_atomically(report, render_html(comparison.results, plots, comparison.missing).encode())
    return report


def all_plots(comparison: Comparison) -> list[Plot]:
    """Every figure that the comparison has the data for: what decides first, what explains after."""
    return [*result_plots(comparison.results), *run_plots(comparison)]


def save_plots(plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Saves figures as <key>.svg and <key>.png, making the folder; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots:
        for suffix, payload in ((".svg", plot.svg), (".png", plot.png())):
            path = folder / f"{plot.key}{suffix}"
            _write_atomically(path, payload)
            paths.append(path)
    return paths


def _write_atomically(path: Path, payload: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload)
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
