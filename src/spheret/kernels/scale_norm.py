"""ScaleNorm, ``r x/|x|``, as one autograd node that keeps its result instead of its input: in a model of spheres the
result is the residual stream, which the first block keeps anyway."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spheret.geometry import compute_dtype, norm
from spheret.kernels.retract import in_function_transform


def scale_norm(x: Tensor, radius: Tensor | None) -> Tensor:
    """``radius x / |x|``, (..., d) row by row, in the compute dtype (arXiv 1910.05895); ``radius`` broadcasts to
    (..., 1), None is 1.

    A row of zeros has no direction: it stays zero, its gradient finite.
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
    # The square root in the norm has no derivative at 0, so it never sees a row of zeros.
    return norm(torch.where(x.any(dim=-1, keepdim=True), x, 1.0))


class _ScaleNorm(torch.autograd.Function):
    """``apply(x, radius)`` -> the scaled rows y and the lengths n of x; None is a radius of 1. With both as outputs the
    backward is made of differentiable quantities: y = r u, dx = r/n (g - <g,u> u) + dn u, dr = <g,u>."""

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
        inverse = 1 if radius is None else 1 / torch.where(radius == 0, 1.0, radius)  # of r, in u = y/r
        dx = None if dn is None else y * (dn * inverse).to(y.dtype)
        if g is None:
            return dx, None
        along = (g * y).sum(-1, keepdim=True) * inverse
        factor = r / n
        tangent = torch.addcmul(g * _narrow(factor, g.dtype), y, _narrow(-factor * along * inverse, y.dtype))
        dr = None if radius is None else along.sum_to_size(radius.shape).to(radius.dtype)
        return tangent if dx is None else tangent + dx, dr


def _narrow(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the rows; that of a row which is hardly a number, below 1e-37, stays finite."""
    largest = torch.finfo(dtype).max
    return factor.clamp(-largest, largest).to(dtype)


def _wide_length(x: Tensor) -> Tensor:
    """|x| in float64, in which no square of a float32 number overflows or vanishes; that of ones for a row of zeros."""
    if x.dtype == torch.float64:
        return _length(x)
    n = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return n.masked_fill(n == 0, math.sqrt(x.shape[-1]))
