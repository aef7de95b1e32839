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
        save(ctx, (h, f), step, p, radius)
        dtype = compute_dtype(h, f)
        scalars = (_cast(v, dtype) for v in (step, p, radius))
        return retract_rows(h.to(dtype), f.to(dtype), *scalars).to(h.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, f, step, p, radius = saved(ctx)
        grads = gradients_by_formula(g, h, f, step, p, radius, need_p=ctx.needs_input_grad[3])
        wanted = ctx.needs_input_grad
        return (
            grads.h if wanted[0] else None,
            grads.f if wanted[1] else None,
            sum_to(grads.step, step) if wanted[2] else None,
            sum_to(grads.p, p) if wanted[3] else None,
            sum_to(grads.radius, radius) if wanted[4] else None,
        )


def save(ctx: Any, tensors: tuple[Tensor, ...], step: Any, p: Any, radius: Any) -> None:
    """Keep tensors for the backward, and three scalars, each a tensor, a float or None."""
    s, e, r = isinstance(step, Tensor), isinstance(p, Tensor), isinstance(radius, Tensor)
    ctx.save_for_backward(*tensors, step if s else None, p if e else None, radius if r else None)
    ctx.constants = None if s else step, None if e else p, None if r else radius


def saved(ctx: Any) -> tuple[Any, ...]:
    """What :func:`save` kept: the tensors, then step, p and radius."""
    *tensors, step, p, radius = ctx.saved_tensors
    s, e, r = ctx.constants
    return *tensors, s if step is None else step, e if p is None else p, r if radius is None else radius


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
