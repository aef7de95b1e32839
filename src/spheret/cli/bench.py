"""`spheret bench`: speed against the baselines, with all variants taking turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from spheret.benchmarking.op import OpBench, bench_op
from spheret.benchmarking.results import TABLE_HEADER, compare_results, to_table
from spheret.benchmarking.step import StepBench, bench_step
from spheret.cli.console import output, say
from spheret.training.run_folder import read_json, write_json


@dataclass(frozen=True)
class _Files:
    out: Path | None = None
    """Write the result to this file, as JSON."""
    against: Path | None = None
    """Result of an earlier benchmark to compare with. Exit with 1 if a ratio grew by more than 15%."""


@dataclass(frozen=True)
class StepCommand(_Files, StepBench):
    """Time whole optimisation steps against a plain nanoGPT of the same shape.

    Example: spheret bench step --schemes pre-ln proj --rounds 20
    """


@dataclass(frozen=True)
class OpCommand(_Files, OpBench):
    """Time one residual connection alone, forward and backward, against Pre-LN.

    Example: spheret bench op --rows 4096 --dim 768 --rounds 20
    """


@dataclass(frozen=True)
class BenchCommand:
    """Time whole optimisation steps (step) or one connection alone (op) against the baselines.

    Example: spheret bench step --schemes pre-ln proj --rounds 20
    """

    what: tyro.conf.OmitArgPrefixes[
        Annotated[StepCommand, tyro.conf.subcommand("step", prefix_name=False)]
        | Annotated[OpCommand, tyro.conf.subcommand("op", prefix_name=False)]
    ]


def run(command: BenchCommand) -> int:
    """Measure and print the table; returns the exit code."""
    console = output()
    setup = command.what
    earlier = read_json(setup.against) if setup.against else None
    kind, measure = _KINDS[type(setup)]
    with console.status("timing ...") as status:
        result = measure(
            kind(**{f.name: getattr(setup, f.name) for f in fields(kind)}),
            on_sample=lambda name, i, _: status.update(f"round {i + 1}/{setup.rounds}: {name}"),
        )
    console.print(_table(to_table(result)))
    note = f"ratio: time divided by that of {result['baseline']} in the same round; median over the rounds"
    say(console, note, "dim")
    if setup.out is not None:
        setup.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(setup.out, result)
        say(console, f"Result: {setup.out}", to_copy=True)
    regressions = [] if earlier is None else compare_results(earlier, result)
    for regression in regressions:
        say(console, f"slower: {regression}")
    return 1 if regressions else 0


_KINDS: dict[type, tuple[Any, Callable[..., dict[str, Any]]]] = {
    StepCommand: (StepBench, bench_step),
    OpCommand: (OpBench, bench_op),
}


def _table(rows: list[tuple[str, ...]]) -> Table:
    """The table of the columns that have values, without the parameters, which say nothing about speed."""
    shown = [i for i, name in enumerate(TABLE_HEADER) if name != "parameters" and any(row[i] != "-" for row in rows)]
    table = Table(box=None, pad_edge=False)
    for i in shown:
        table.add_column(TABLE_HEADER[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table
