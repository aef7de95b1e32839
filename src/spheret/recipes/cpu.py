"""A run that takes minutes on two CPU cores."""

from __future__ import annotations

from spheret.comparison.plan import CompareConfig
from spheret.comparison.settings import RunSettings
from spheret.recipes.base import Recipe


def cpu_demo(scheme: str = "proj") -> Recipe:
    """One of the runs that `make demo` compares: 6 blocks of width 128 on the bytes of Python's standard library.

    All numbers are ours, the defaults of `spheret compare`: the smallest model, and as few steps, that still show
    differences between learning rates. Learning rate: 0.4/d (ours, docs/log.md).
    """
    return Recipe(
        title="one run of `make demo`, on Python's source",
        settings=RunSettings(device="cpu"),
        scheme=scheme,
        schemes=CompareConfig().schemes,
    )
