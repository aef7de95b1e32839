"""Constant factors on the outputs of the linear maps: how they are applied, and how they go into weights."""

from __future__ import annotations

from torch import Tensor, nn


def times(x: Tensor, factor: float) -> Tensor:
    """``factor x``; a factor of 1 costs nothing."""
    return x if factor == 1 else factor * x


def scale_rows(linear: nn.Linear, factor: float | Tensor) -> None:
    """Multiply the output of ``linear`` by ``factor``, one number or one for each row, in place."""
    linear.weight.mul_(factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor)
    if linear.bias is not None:
        linear.bias.mul_(factor)
