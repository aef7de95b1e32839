"""The retraction as one autograd node with a hand-written backward, used by eager code and traced by ``torch.compile``.

Saved for the backward are ``h``, ``f`` and the scalars, which the neighbouring layers keep anyway. Row statistics are
recomputed, so the backward is itself a differentiable function of its inputs and second derivatives are right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spheret.geometry import Gradients, compute_dtype, retract_rows, retract_vjp
from spheret.geometry.angles import Exponent


class Retraction(torch.autograd.Function):
    """``apply(h, f, step, p, radius)``; step, p and radius are floats or tensors, radius may be None."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, f: Tensor, step: Tensor | float, p: Exponent, radius: Tensor | float | None
    ) -> Tensor:
        scalars = (step, p, radius)
        ctx.save_for_backward(h, f, *(v for v in scalars if isinstance(v, Tensor)))
        ctx.constants = tuple(None if isinstance(v, Tensor) else (v,) for v in scalars)
        dtype = compute_dtype(h, f)
        return retract_rows(h.to(dtype), f.to(dtype), *(_cast(v, dtype) for v in scalars)).to(h.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, f, *saved = ctx.saved_tensors
        step, p, radius = (saved.pop(0) if constant is None else constant[0] for constant in ctx.constants)
        grads = gradients_by_formula(g, h, f, step, p, radius, need_p=ctx.needs_input_grad[3])
        wanted = ctx.needs_input_grad
        return (
            grads.h if wanted[0] else None,
            grads.f if wanted[1] else None,
            sum_to(grads.step, step) if wanted[2] else None,
            sum_to(grads.p, p) if wanted[3] else None,
            sum_to(grads.radius, radius) if wanted[4] else None,
        )


def gradients_by_formula(g: Tensor, h: Tensor, f: Tensor, step: Any, p: Any, radius: Any, *, need_p: bool) -> Gradients:
    """``retract_vjp`` for arguments of any dtypes: those of h and f in theirs, the others of each row, in the compute
    dtype."""
    dtype = compute_dtype(h, f)
    arguments = (_cast(value, dtype) for value in (g, h, f, step, p, radius))
    grads = retract_vjp(*arguments, need_p=need_p)
    return grads._replace(h=grads.h.to(h.dtype), f=grads.f.to(f.dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) else value


def sum_to(per_row: Tensor | None, like: Any) -> Tensor | None:
    """Sum per-row gradients (..., 1) to the shape of the parameter they belong to."""
    return None if per_row is None else per_row.sum_to_size(like.shape).to(like.dtype)
