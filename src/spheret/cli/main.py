"""The `spheret` command. Every subcommand is a frozen dataclass, from which tyro makes the flags and the help."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from spheret import __version__
from spheret.cli import bench, compare, plan, prepare, report, schemes, train
from spheret.cli.errors import UsageError, as_flags, explain
from spheret.comparison.compare import ComparisonBusy

DESCRIPTION = """Sphere-retraction residual connections for transformers: compare schemes, train, report.

Example: spheret compare --schemes pre-ln proj --seeds 3
`spheret COMMAND --help` explains a command. SPHERET_DEBUG=1 shows the traceback of an error."""

COMMANDS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "compare": (compare.CompareCommand, compare.run),
    "train": (train.TrainCommand, train.run),
    "prepare": (prepare.PrepareCommand, prepare.run),
    "report": (report.ReportCommand, report.run),
    "plan": (plan.PlanCommand, plan.run),
    "bench": (bench.BenchCommand, bench.run),
    "schemes": (schemes.SchemesCommand, schemes.run),
}
# What a user can act on. A RuntimeError of PyTorch, say, is not among them: it needs its traceback.
USER_ERRORS = (UsageError, ValueError, OSError, ImportError, ComparisonBusy)


def main(arguments: list[str] | None = None) -> None:
    """Parse and run. Exit codes: 0, 1 where a run failed, 2 for an error that a user can act on, 128 + signal."""
    words = sys.argv[1:] if arguments is None else arguments
    if words in (["--version"], ["-V"]):
        print(f"spheret {__version__}")
        sys.exit(0)
    sys.exit(_run(words or ["--help"]))


def _run(words: list[str]) -> int:
    classes = {name: command for name, (command, _) in COMMANDS.items()}
    try:  # building a configuration checks it, so a bad value is an error of the same kind here
        given = train.with_recipe(words)
        command = tyro.extras.subcommand_cli_from_dict(classes, args=given, prog="spheret", description=DESCRIPTION)
        return next(run for kind, run in COMMANDS.values() if type(command) is kind)(command)
    except KeyboardInterrupt as stop:
        print("spheret: interrupted", file=sys.stderr)
        return getattr(stop, "exit_code", 130)
    except USER_ERRORS as error:
        if os.environ.get("SPHERET_DEBUG"):
            raise
        name = words[0]
        kind = classes.get(name)
        print(f"spheret {name}: {as_flags(explain(error), kind) if kind else explain(error)}", file=sys.stderr)
        return 2
