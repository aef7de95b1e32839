"""Constraints on weight matrices: rows, or columns, of norm 1 or of at most norm 1.

A module names the weights it answers for through a method ``stream_axes()``, {weight: axis}: the axis along which the
weight meets the residual stream, 1 for a matrix that reads it and 0 for one that writes it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def matrices(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Every weight matrix of ``model`` that meets the residual stream, with the axis of the stream."""
    for module in model.modules():
        axes = getattr(module, "stream_axes", None)
        for name, axis in axes().items() if callable(axes) else ():
            yield module.get_parameter(name), axis


@torch.no_grad()
def normalise(weight: Tensor, axis: int) -> None:
    """Divide ``weight`` in place by its norms along ``axis``; what is zero stays zero."""
    norms = _norms(weight, axis)
    weight.copy_(weight / norms.clamp_min(torch.finfo(norms.dtype).tiny))


@torch.no_grad()
def bound(weight: Tensor, axis: int) -> None:
    """Bring norms of ``weight`` along ``axis`` that are above 1 back to 1, in place."""
    weight.copy_(weight / _norms(weight, axis).clamp_min(1.0))


def _norms(weight: Tensor, axis: int) -> Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight, dim=axis, keepdim=True, dtype=dtype)
