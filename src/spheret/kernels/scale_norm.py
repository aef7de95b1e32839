"""ScaleNorm, ``r x/|x|``, as one autograd node that saves its result instead of its input: on a sphere, the result is
the residual stream, which the first block saves anyway."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spheret.geometry import compute_dtype, norm
from spheret.kernels.retract import in_function_transform


def scale_norm(x: Tensor, radius: Tensor | None) -> Tensor:
    """``radius x / |x|`` for every row of ``x`` (..., d), in the compute dtype (arXiv 1910.05895). ``radius``
    broadcasts to (..., 1); None is 1.

    A row of zeros has no direction: it stays zero, and its gradient is finite.
    """
    if in_function_transform():
        return x / _length(x) if radius is None else radius * (x / _length(x))
    y: Tensor
    y, _ = _ScaleNorm.apply(x.to(compute_dtype(x)), radius)
    return y


def unit(x: Tensor) -> Tensor:
    """``x / |x|``: :func:`scale_norm` with radius 1."""
    return scale_norm(x, None)


def _length(x: Tensor) -> Tensor:
    # The square root in the norm has no derivative at 0, so a row of zeros is replaced by ones.
    return norm(torch.where(x.any(dim=-1, keepdim=True), x, 1.0))


class _ScaleNorm(torch.autograd.Function):
    """``apply(x, radius)`` -> the scaled rows y and the lengths n of x; radius None is 1. Because both are outputs,
    the backward pass is differentiable too: y = r u, dx = r/n (g - <g,u> u) + dn u, dr = <g,u>."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: Tensor | None) -> tuple[Tensor, Tensor]:
        n = _wide_length(x)
        y = x * _narrow((1 if radius is None else radius) / n, x.dtype)
        ctx.save_for_backward(y, n, radius)
        ctx.set_materialize_grads(False)
        return y, n

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        y, n, radius = ctx.saved_tensors
        r: Any = 1 if radius is None else radius
        inverse = 1 if radius is None else 1 / torch.where(radius == 0, 1.0, radius)  # 1/r, for u = y/r
        dx = None if dn is None else y * (dn * inverse).to(y.dtype)
        if g is None:
            return dx, None
        along = (g * y).sum(-1, keepdim=True) * inverse
        factor = r / n
        tangent = torch.addcmul(g * _narrow(factor, g.dtype), y, _narrow(-factor * along * inverse, y.dtype))
        dr = None if radius is None else along.sum_to_size(radius.shape).to(radius.dtype)
        return tangent if dx is None else tangent + dx, dr


def _narrow(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``factor`` in the dtype of the rows, clamped to stay finite for rows whose norm is below about 1e-37."""
    largest = torch.finfo(dtype).max
    return factor.clamp(-largest, largest).to(dtype)


def _wide_length(x: Tensor) -> Tensor:
    """|x| in float64, where no square of a float32 number overflows or underflows; sqrt(d) for a row of zeros."""
    if x.dtype == torch.float64:
        return _length(x)
    n = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return n.masked_fill(n == 0, math.sqrt(x.shape[-1]))
