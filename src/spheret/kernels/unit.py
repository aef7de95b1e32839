"""``h / |h|`` with the derivative written out: half the passes of automatic differentiation, and nothing but the result
and one number a row to keep for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spheret.geometry import compute_dtype


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        scale = _or_one(h.abs().amax(dim=-1, keepdim=True))
        x = h / scale  # the square of an entry neither overflows nor vanishes
        length = _or_one(torch.linalg.vector_norm(x, dim=-1, keepdim=True))
        y = x / length
        ctx.save_for_backward(y, scale * length)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y, norm = ctx.saved_tensors
        return (gradient - (gradient * y).sum(-1, keepdim=True) * y) / norm


def _or_one(scale: Tensor) -> Tensor:
    """A row of zeros has no direction: divided by 1 it stays zero, its gradient finite."""
    return torch.where(scale > 0, scale, 1.0)


def unit(h: Tensor) -> Tensor:
    """``h / |h|``, (..., d) row by row, in the compute dtype. A row of zeros stays zero and passes its gradient on."""
    result: Tensor = _Unit.apply(h.to(compute_dtype(h)))
    return result
