"""`spheret schemes`: the methods, their equations and sources, read from the files that implement them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from spheret.connections import available, parse_scheme


@dataclass(frozen=True)
class SchemesCommand:
    """List the residual schemes, or explain one: equation, source, cost and options.

    Example: spheret schemes spheret:p=1
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """Scheme to explain; without it, all are listed."""


def run(command: SchemesCommand) -> int:
    """Print the list, or one scheme's own documentation and its options with their defaults."""
    console = Console(soft_wrap=True, highlight=False)
    if not command.name:
        for name in available():
            first = _documentation(name).splitlines()[0]
            console.print(f"{name:28s}{first}", markup=False)
        return 0
    scheme = parse_scheme(command.name)
    console.print(_documentation(command.name), markup=False)
    console.print("Options:")
    for field in dataclasses.fields(scheme):
        console.print(f"  {field.name.replace('_', '-')}={getattr(scheme, field.name)}", markup=False)
    return 0


def _documentation(name: str) -> str:
    """Docstring of the file that implements the scheme."""
    return inspect.getdoc(sys.modules[type(parse_scheme(name)).__module__]) or ""
