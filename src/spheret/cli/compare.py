"""`spheret compare`: run a comparison, show it, write its report. `spheret report`: show and report a finished one."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spheret.cli.console import flags_checked, output, say
from spheret.cli.progress import view
from spheret.cli.schemes import say_cautions
from spheret.comparison.compare import compare, failures, warnings_of
from spheret.comparison.runs import CompareConfig
from spheret.comparison.statistics import all_pairs
from spheret.reporting import (
    is_run,
    load_results,
    load_run,
    markdown,
    outcome_lines,
    pairs_markdown,
    print_side_tables,
    print_table,
    run_rows,
    write_report,
    write_run_report,
)

# --- compare ---


@dataclass(frozen=True, kw_only=True)
class CompareCommand(CompareConfig):
    """Compare residual schemes: schemes x learning rates x seeds on one corpus -> table, report.html, verdict.

    Example: spheret compare --schemes pre-ln proj cay --lrs 2e-3 4e-3 8e-3 --seeds 3 --steps 400 --out runs/first

    The same command again runs what is missing and reuses the runs that have ended.
    """

    def __post_init__(self) -> None:
        with flags_checked():
            super().__post_init__()


def run(config: CompareConfig) -> int:
    """Compare, print table and verdict, write results.json, results.csv and report.html; returns the exit code."""
    _require_report_libraries()
    console = output()
    size = f"{config.total_runs} runs of {config.steps} steps"
    say(console, f"Comparing {', '.join(config.names)}: {size}, baseline {config.names[0]}.")
    say_cautions(console, config.names)

    def announce(command: str) -> None:
        notice = (
            f"{config.out} holds another comparison. Its runs are kept, but its report is replaced. Its command was"
        )
        say(console, notice, "yellow")
        say(console, f"  {command}", "yellow", to_copy=True)

    try:
        with view(console) as live:
            results = compare(
                config, on_prepare=lambda line: say(console, line, "dim"), on_tick=live.tick, on_replace=announce
            )
    except KeyboardInterrupt as stop:
        with suppress(OSError):  # it may be the output that ended
            say(console, f"\nStopped. {config.out} keeps the runs that have ended. To continue, repeat the command:")
            say(console, f"  {config.command()}", to_copy=True)
        return getattr(stop, "exit_code", 130)
    report = write_report(config.out, partial=True)  # before anything is printed, which may fail
    say(console)
    print_table(console, results)
    print_side_tables(console, results)
    say(console)
    say(console, results["verdict"])
    for warning, runs in warnings_of(results, config.out).items():
        say(console, f"Warning from {runs} of {config.total_runs} runs: {warning}", "yellow")
    crashed = failures(results)
    for folder, reason in crashed:
        print(f"{config.out / folder} {reason}", file=sys.stderr)
    say(console)
    say(console, f"Report:  {report}", to_copy=True)
    say(console, f"Results: {config.out / 'results.json'}, {config.out / 'results.csv'}", to_copy=True)
    return 1 if crashed else 0


def _require_report_libraries() -> None:
    """ImportError if a library of the report is missing: now, and not after hours of training."""
    missing = [name for name in ("scipy", "matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'intervals and report need {", ".join(missing)}: pip install "spheret[report]"')


# --- report ---


@dataclass(frozen=True)
class ReportCommand:
    """Rebuild table, plots and report.html from the folder of a comparison, or of one run.

    Example: spheret report runs/first --figures figures/

    A run that has not ended is reported as far as it has come.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder that `spheret compare` or `spheret train` wrote."""
    figures: Path | None = None
    """Also save every figure in this folder, as .svg and .png."""
    markdown: bool = False
    """Print the table as Markdown, to paste."""
    all_pairs: bool = False
    """Of a comparison: also compare every scheme with every other, not only with the baseline."""


def run_report(command: ReportCommand) -> int:
    """Print the table and write the report; returns the exit code."""
    console: Console = output()
    if is_run(command.folder):
        return _report_run(console, command)
    results = load_results(command.folder)
    if command.all_pairs:
        results["all_pairs"] = all_pairs(results["schemes"])
    report = write_report(command.folder, partial=True, figures=command.figures, all_pairs=command.all_pairs)
    if command.markdown:
        print("\n".join(filter(None, (markdown(results), pairs_markdown(results)))))
    else:
        print_table(console, results)
        print_side_tables(console, results)
        say(console)
        say(console, results["verdict"])
        say(console)
    say(console, f"Report: {report}", to_copy=True)
    return 0


def _report_run(console: Console, command: ReportCommand) -> int:
    run = load_run(command.folder)
    report = write_run_report(command.folder, figures=command.figures)
    rows = run_rows(run)
    if command.markdown:
        print("\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]))
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(name, escape(value))
        console.print(table)
        say(console)
        for line in outcome_lines(run):
            say(console, line)
        say(console)
    say(console, f"Report: {report}", to_copy=True)
    return 0
