"""`spheret schemes`: the schemes, their equations and sources, read from the files that implement them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import docstring_parser
import tyro
from rich.console import Console
from torch import nn

from spheret.cli.console import output, say, say_hanging
from spheret.connections import list_schemes, parse_scheme
from spheret.connections.base import Scheme

LEGEND = (
    "F is a sublayer, f its output, h a hidden state of d numbers, L the number of blocks of two sublayers each.",
    "Cost: one unit is one number read or written per entry of h. Units are counted operation by operation for one "
    "connection in eager PyTorch, forward and backward, including the sum of the two gradients that meet at h.",
    "spheret:p=<x> takes any x in (0, inf]. `spheret schemes NAME` explains a scheme and lists its options.",
)


@dataclass(frozen=True)
class SchemesCommand:
    """List the residual schemes, or explain one: equation, what is normalised, parameters, cost, source, options.

    Example: spheret schemes spheret:p=0.5
    """

    # tyro shows an optional positional argument like a required one, so add the brackets by hand.
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[SCHEME]", help_behavior_hint="")] = ""
    """Scheme to explain. Without it, all schemes are listed."""


def run(command: SchemesCommand) -> int:
    """Print the list, or one scheme's documentation and its options with their values; returns the exit code."""
    console = output()
    if command.name:
        _explain(console, parse_scheme(command.name))
    else:
        _list(console)
    return 0


def _list(console: Console) -> None:
    """Print every scheme on its own line. The members of a family stand together, above the facts that they share."""
    for _, family in groupby(list_schemes(), key=lambda name: type(parse_scheme(name))):
        names = list(family)
        width = max(map(len, names))
        for name in names:
            say_hanging(console, f"{name:{width}}  ", parse_scheme(name).summary)
        scheme = parse_scheme(names[0])
        cautions = (parse_scheme(name).caution for name in names)
        caution = {"caution": next(filter(None, cautions), "")}
        _say_facts(console, {"equation": scheme.equation} | _facts(scheme) | caution, indent=4)
        say(console)
    for line in LEGEND:
        say_hanging(console, "", line)


def _explain(console: Console, scheme: Scheme) -> None:
    documentation = _documentation(scheme)
    if not documentation.startswith(scheme.summary):
        say_hanging(console, "", scheme.summary + ".")
        say(console)
    for paragraph in documentation.split("\n\n"):
        if paragraph.startswith(" "):  # an equation keeps its lines
            say(console, paragraph, to_copy=True)
        else:
            say_hanging(console, "", paragraph)
        say(console)
    _say_facts(console, _facts(scheme))
    say(console, "\nOptions, each written as name:option=value,option=value:")
    meanings = _meanings(type(scheme))
    options = {
        f"{field.name.replace('_', '-')}={_word(getattr(scheme, field.name))}": meanings.get(field.name, "")
        for field in dataclasses.fields(scheme)
    }
    _say_facts(console, options, indent=2)
    for name, values in scheme.presets.items():
        if values:
            stands_for = ",".join(f"{key.replace('_', '-')}={_word(value)}" for key, value in values.items())
            say_hanging(console, "  ", f"preset={name} stands for {stands_for}")


def _facts(scheme: Scheme) -> dict[str, str]:
    return {
        "normalised": scheme.placement,
        "parameters": _parameters(scheme),
        "cost": scheme.cost,
        "source": scheme.source,
        "caution": scheme.caution,
    }


def say_cautions(console: Console, schemes: Sequence[str]) -> None:
    """Print what users must know about the schemes that they are about to train, each sentence once."""
    found: dict[str, list[str]] = {}
    for name in schemes:
        found.setdefault(parse_scheme(name).caution, []).append(name)
    for caution, names in found.items():
        if caution:
            say(console, f"Caution, {', '.join(names)}: {caution}", "yellow")


def _parameters(scheme: Scheme) -> str:
    """Learned numbers of a connection and of the stream, in terms of the width d."""
    # Built at two widths and counted, so that no text can disagree with the code.
    widths = (64, 128)
    streams = [scheme.stream(width, 2) for width in widths]
    connections = [
        scheme.connection(width, layer_idx=1, n_layer=2, stream=stream)
        for width, stream in zip(widths, streams, strict=True)
    ]
    return f"{_size(connections, widths)} in a connection, {_size(streams, widths)} at the two ends of the model"


def _size(modules: Sequence[nn.Module], widths: tuple[int, int]) -> str:
    """The number of learned parameters as a linear function of d, from its values at two widths."""
    first, second = (sum(p.numel() for p in module.parameters() if p.requires_grad) for module in modules)
    slope = (second - first) // (widths[1] - widths[0])
    constant = first - slope * widths[0]
    terms = [f"{slope if slope > 1 else ''}d"] * (slope > 0) + [str(constant)] * (constant > 0)
    return " + ".join(terms) or "none"


def _say_facts(console: Console, facts: Mapping[str, str], indent: int = 0) -> None:
    """Print names in a column on the left and their texts on the right, where there is a text."""
    facts = {name: text for name, text in facts.items() if text}
    width = max(map(len, facts))
    for name, text in facts.items():
        for i, line in enumerate(text.splitlines() or [""]):
            say_hanging(console, f"{' ' * indent}{'' if i else name:{width}}  ", line)


def _word(value: Any) -> str:
    """An option's value in the grammar of scheme names."""
    if value is None:
        return "(set by the model's size)"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _meanings(cls: type[Scheme]) -> dict[str, str]:
    """The meaning of each option, from the ``Attributes`` sections of the scheme's class and its base classes."""
    return {
        item.arg_name: " ".join((item.description or "").split())
        for base in reversed(cls.__mro__)
        for item in docstring_parser.parse(base.__doc__ or "").params
    }


def _documentation(scheme: Scheme) -> str:
    """Docstring of the file that implements the scheme."""
    return (inspect.getdoc(sys.modules[type(scheme).__module__]) or "").replace("``", "")
