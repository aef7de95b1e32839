"""`spheret bench`: speed against the baselines, all variants in turn in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from spheret.benchmarking.op import OpBench, bench_op
from spheret.benchmarking.step import TABLE_HEADER, StepBench, bench_step, compare_results, to_table
from spheret.cli.console import output, say
from spheret.training.run_folder import write_json


@dataclass(frozen=True)
class _Files:
    out: Path | None = None
    """Write the result there as JSON."""
    against: Path | None = None
    """Result of an earlier benchmark: fail if a ratio grew by more than 15%."""


@dataclass(frozen=True)
class StepCommand(_Files, StepBench):
    """Whole optimisation steps against a plain nanoGPT of the same shape.

    Example: spheret bench step --schemes pre-ln proj --rounds 20
    """


@dataclass(frozen=True)
class OpCommand(_Files, OpBench):
    """One residual connection alone, forward and backward, against Pre-LN.

    Example: spheret bench op --rows 4096 --dim 768 --rounds 20
    """


@dataclass(frozen=True)
class BenchCommand:
    """Time whole optimisation steps (step), or one connection alone (op), against the baselines.

    Example: spheret bench step --schemes pre-ln proj --rounds 20
    """

    what: tyro.conf.OmitArgPrefixes[
        Annotated[StepCommand, tyro.conf.subcommand("step", prefix_name=False)]
        | Annotated[OpCommand, tyro.conf.subcommand("op", prefix_name=False)]
    ]


def run(command: BenchCommand) -> int:
    """Measure, print the table; returns the exit code."""
    console = output()
    setup = command.what
    earlier = json.loads(setup.against.read_text()) if setup.against else None
    kind, measure = _KINDS[type(setup)]
    with console.status("timing ...") as status:
        result = measure(
            kind(**{f.name: getattr(setup, f.name) for f in fields(kind)}),
            on_sample=lambda name, i, _: status.update(f"round {i + 1}/{setup.rounds}: {name}"),
        )
    console.print(_table(to_table(result)))
    say(console, f"ratio: time over that of {result['baseline']}, round by round; median of the rounds", "dim")
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
    """The columns that say something here; parameters are not what is timed."""
    shown = [i for i, name in enumerate(TABLE_HEADER) if name != "parameters" and any(row[i] != "-" for row in rows)]
    table = Table(box=None, pad_edge=False)
    for i in shown:
        table.add_column(TABLE_HEADER[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table
