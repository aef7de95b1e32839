"""`spheret schemes`: the methods, their equations and sources, read from the files that implement them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from spheret.cli.console import output, say
from spheret.connections import available, parse_scheme
from spheret.connections.base import Scheme


@dataclass(frozen=True)
class SchemesCommand:
    """List the residual schemes, or explain one: equation, source, cost and options.

    Example: spheret schemes spheret:p=0.5
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCHEME", help_behavior_hint="")] = ""
    """Scheme to explain; without it, all are listed."""


def run(command: SchemesCommand) -> int:
    """Print the list, or one scheme's own documentation and its options with their values."""
    console = output()
    if not command.name:
        names = available()
        for name in names:
            say(console, f"{name:{max(map(len, names))}}  {parse_scheme(name).summary}")
        say(
            console,
            "\nspheret:p=<x> takes any x in (0, inf]. `spheret schemes NAME` explains a scheme and lists its options.",
        )
        return 0
    scheme = parse_scheme(command.name)
    say(console, f"{scheme.summary}\n\n{_documentation(scheme)}\n")
    say(console, "Options, each written as name:option=value,option=value:")
    for field in dataclasses.fields(scheme):
        value = getattr(scheme, field.name)
        say(console, f"  {field.name.replace('_', '-')}={_word(value)}")
    for name, options in scheme.presets.items():
        if not options:
            continue
        stands_for = ",".join(f"{key.replace('_', '-')}={_word(value)}" for key, value in options.items())
        say(console, f"  preset={name} stands for {stands_for}")
    return 0


def _word(value: Any) -> str:
    """An option's value in the grammar of scheme names."""
    if value is None:
        return "(by the model's size)"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _documentation(scheme: Scheme) -> str:
    """Docstring of the file that implements the scheme."""
    return inspect.getdoc(sys.modules[type(scheme).__module__]) or ""
