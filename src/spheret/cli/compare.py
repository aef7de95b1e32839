"""`spheret compare`: run the comparison, show it, write the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console

from spheret.cli.progress import view
from spheret.experiments.compare import compare, failures
from spheret.experiments.plan import CompareConfig
from spheret.reporting import rich_table, write_report


@dataclass(frozen=True, kw_only=True)
class CompareCommand(CompareConfig):
    """Compare residual schemes: schemes x learning rates x seeds on one corpus -> table, report.html, verdict.

    Example: spheret compare --schemes pre-ln proj spheret:p=0.5 --lrs 2e-3 4e-3 8e-3 --seeds 3 --steps 400 --out runs/first
    """


def run(config: CompareConfig) -> int:
    """Compare, print table and verdict, write results.json, results.csv and report.html; returns the exit code."""
    console = Console()
    runs = len(config.names) * (config.seeds + (len(config.lrs) if len(config.lrs) > 1 else 0))
    console.print(
        f"Comparing {', '.join(config.names)}: {runs} runs of {config.steps} steps, baseline {config.names[0]}.",
        highlight=False,
        soft_wrap=True,
    )
    try:
        with view(console) as live:
            results = compare(
                config,
                on_prepare=lambda line: console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True),
                on_tick=live.tick,
            )
    except KeyboardInterrupt:
        console.print(
            f"\nStopped. Finished runs are kept in {config.out}; the same command goes on from there:", soft_wrap=True
        )
        console.print(f"  {config.command()}", markup=False, highlight=False, soft_wrap=True)
        return 130
    report = write_report(config.out, partial=True)
    console.print()
    console.print(rich_table(results))
    console.print()
    console.print(results["verdict"], markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(f"Report:  {report}", highlight=False, soft_wrap=True)
    console.print(
        f"Results: {config.out / 'results.json'}, {config.out / 'results.csv'}", highlight=False, soft_wrap=True
    )
    crashed = failures(results, config.out)
    for run_folder, error in crashed:
        print(f"crashed: {config.out / run_folder}: {error}", file=sys.stderr)
    return 1 if crashed else 0
