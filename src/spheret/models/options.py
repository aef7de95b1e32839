"""The choices of a model's configuration, put in the place of what its scheme asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from spheret.connections.options import Factors, Head, MLPKind, ModelOptions, Positions, QKNorm

AUTO = "auto"
CHOICES: dict[str, tuple[str, ...]] = {
    "positions": get_args(Positions),
    "mlp": get_args(MLPKind),
    "qk_norm": get_args(QKNorm),
    "head": get_args(Head),
}


def check_choice(name: str, value: str) -> None:
    """ValueError: ``value`` is none of what the option ``name`` can be."""
    if value not in (AUTO, *CHOICES[name]):
        raise ValueError(f"{name} = {value!r}: choose one of {AUTO}, {', '.join(CHOICES[name])}")


def resolve(wanted: ModelOptions, chosen: Mapping[str, str], scheme: str, folded: bool) -> ModelOptions:
    """``wanted`` with every choice that is not ``auto`` in its place, and without factors where they are folded.

    Raises:
        ValueError: a choice that the scheme does not leave open.
    """
    changes: dict[str, Any] = {name: value for name, value in chosen.items() if value != AUTO}
    for name, value in changes.items():
        if name in wanted.fixed and value != getattr(wanted, name):
            raise ValueError(
                f"{name} = {value!r} does not go with scheme {scheme}, which is built on "
                f"{getattr(wanted, name)}: leave {name} at {AUTO}"
            )
    if folded:
        changes["factors"] = Factors()
    return replace(wanted, **changes)
