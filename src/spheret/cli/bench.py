"""`spheret bench step`: speed of whole optimisation steps against nanoGPT, in one run."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from spheret.cli.console import output, say
from spheret.experiments.bench import TABLE_HEADER, StepBench, bench_step, compare_results, to_table
from spheret.training.files import write_json


@dataclass(frozen=True)
class BenchCommand(StepBench):
    """Time whole optimisation steps against a plain nanoGPT of the same shape, all variants in turn in one process.

    Example: spheret bench step --schemes pre-ln proj --rounds 20
    """

    what: Annotated[Literal["step"], tyro.conf.Positional] = "step"
    """What is timed."""
    out: Path | None = None
    """Write the result there as JSON."""
    against: Path | None = None
    """Result of an earlier benchmark: fail if a ratio grew by more than 15%."""


def run(command: BenchCommand) -> int:
    """Measure, print the table; returns the exit code."""
    console = output()
    with console.status("timing ...") as status:
        setup = StepBench(**{f.name: getattr(command, f.name) for f in fields(StepBench)})
        result = bench_step(setup, on_sample=lambda name, i, _: status.update(f"round {i + 1}/{setup.rounds}: {name}"))
    console.print(_table(to_table(result)))
    say(console, "ratio: step time over that of nanogpt, round by round; median of the rounds", "dim")
    if command.out is not None:
        command.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(command.out, result)
        say(console, f"Result: {command.out}", to_copy=True)
    regressions = compare_results(json.loads(command.against.read_text()), result) if command.against else []
    for regression in regressions:
        say(console, f"slower: {regression}")
    return 1 if regressions else 0


def _table(rows: list[tuple[str, ...]]) -> Table:
    """The columns that say something here: memory is measured on CUDA alone, and parameters are not what is timed."""
    memory = TABLE_HEADER.index("memory")
    shown = [i for i, name in enumerate(TABLE_HEADER) if name != "parameters"]
    if all(row[memory] == "-" for row in rows):
        shown.remove(memory)
    table = Table(box=None, pad_edge=False)
    for i in shown:
        table.add_column(TABLE_HEADER[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table
