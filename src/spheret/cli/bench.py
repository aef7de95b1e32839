"""`spheret bench`: speed against the baselines, in one run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchCommand:
    """Time whole optimisation steps against a plain nanoGPT of the same shape.

    Example: spheret bench --schemes pre-ln proj
    """


def run(command: BenchCommand) -> int:
    raise NotImplementedError
