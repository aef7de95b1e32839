"""Tables, figures and the HTML report of a comparison.

Nothing here imports matplotlib, jinja2 or scipy before it is used.
"""

from __future__ import annotations

from spheret.reporting.build import all_plots, save_plots, write_report
from spheret.reporting.collect import Comparison, RunFolder, load_comparison, load_results, load_run, read_metrics
from spheret.reporting.style import Plot
from spheret.reporting.table import Row, csv_text, markdown, print_table, rich_table, rows

__all__ = [
    "Comparison",
    "Plot",
    "Row",
    "RunFolder",
    "all_plots",
    "csv_text",
    "load_comparison",
    "load_results",
    "load_run",
    "markdown",
    "print_table",
    "read_metrics",
    "rich_table",
    "rows",
    "save_plots",
    "write_report",
]
