"""Tables, figures and the HTML report of a comparison.

matplotlib, jinja2 and scipy are imported only when they are used.
"""

from __future__ import annotations

from spheret.reporting.collect import ComparisonFolder, RunFolder, is_run, load_comparison, load_results, load_run
from spheret.reporting.report import all_plots, save_plots, write_report, write_run_report
from spheret.reporting.side_tables import pairs_markdown, print_side_tables
from spheret.reporting.single_run import outcome_lines, run_rows
from spheret.reporting.style import Plot
from spheret.reporting.table import Row, csv_text, markdown, print_table, rich_table, rows

__all__ = [
    "ComparisonFolder",
    "Plot",
    "Row",
    "RunFolder",
    "all_plots",
    "csv_text",
    "is_run",
    "load_comparison",
    "load_results",
    "load_run",
    "markdown",
    "outcome_lines",
    "pairs_markdown",
    "print_side_tables",
    "print_table",
    "rich_table",
    "rows",
    "run_rows",
    "save_plots",
    "write_report",
    "write_run_report",
]
