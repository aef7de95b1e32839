"""The `spheret` command. Every subcommand is a frozen dataclass, from which tyro makes the flags and the help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro
from rich.console import Console

from spheret.cli import bench, compare, prepare, report, schemes, train

DESCRIPTION = "Sphere-retraction residual connections for transformers: compare schemes, train, report."

COMMANDS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "compare": (compare.CompareCommand, compare.run),
    "train": (train.TrainCommand, train.run),
    "prepare": (prepare.PrepareCommand, prepare.run),
    "report": (report.ReportCommand, report.run),
    "bench": (bench.BenchCommand, bench.run),
    "schemes": (schemes.SchemesCommand, schemes.run),
}


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and turn errors that a user can act on into one line on stderr (exit code 2)."""
    classes = {name: command for name, (command, _) in COMMANDS.items()}
    try:  # building a configuration checks it, so a bad value is an error of the same kind here
        command = tyro.extras.subcommand_cli_from_dict(classes, args=arguments, prog="spheret", description=DESCRIPTION)
        code = next(run for kind, run in COMMANDS.values() if type(command) is kind)(command)
    except (ValueError, FileNotFoundError, FileExistsError, RuntimeError, ImportError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"spheret: {error}", markup=False)
        code = 2
    sys.exit(code)
