"""The compiled retraction as one autograd node, with one output or with one for each of its two readers.

The next hidden state is read twice: by the next connection and by the next sublayer. As two outputs (the same numbers,
the second in the dtype in which the sublayer computes) their gradients arrive apart and are added in the backward pass
over the rows, which costs one more read instead of a pass of its own.

Saved are ``h``, ``f``, which the neighbouring layers keep anyway, and one float32 number of each row (eight on a GPU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spheret.geometry import compute_dtype
from spheret.kernels.autograd import gradients_by_formula, save, saved, sum_to
from spheret.kernels.cpu import Scalar
from spheret.kernels.operator import kernels, retract_rows, retract_rows_backward, split_all


class FusedRetraction(torch.autograd.Function):
    """``apply(h, f, step, p, radius, read_dtype)`` -> h', or (h', h' in ``read_dtype``) unless that is None."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, f: Tensor, step: Scalar, p: Scalar, radius: Scalar, read_dtype: torch.dtype | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        extra = None if read_dtype is h.dtype else read_dtype
        if _as_operator():
            out, read, kept = retract_rows(h, f, *split_all(step, p, radius), extra)
        else:
            out, read, kept = kernels(h).forward(h, f, step, p, radius, extra)
        save(ctx, (h, f, kept), step, p, radius)
        ctx.set_materialize_grads(False)
        if read_dtype is None:
            return out
        return out, out.view_as(out) if extra is None else read

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, f, kept, step, p, radius = saved(ctx)
        if g is None:
            g, g2 = g2, None
        if g is None:
            return (None,) * 6
        dh: Tensor
        df: Tensor
        sums: Any
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Somebody differentiates again: the compiled loops have no second derivative, the formulas have.
            dtype = compute_dtype(h, f)
            total = g if g2 is None else g.to(dtype) + g2.to(dtype)
            dh, df, *sums = gradients_by_formula(total, h, f, step, p, radius, need_p=ctx.needs_input_grad[3])
        elif _as_operator():
            dh, df, sums = retract_rows_backward(g, g2, h, f, kept, *split_all(step, p, radius))
        else:
            dh, df, sums = kernels(h).backward(g, g2, h, f, kept, step, p, radius)
        _, _, learns_step, learns_p, learns_radius, _ = ctx.needs_input_grad
        return (
            dh,
            df,
            _entry(sums, 0, step) if learns_step else None,
            _entry(sums, 1, p) if learns_p else None,
            _entry(sums, 2, radius) if learns_radius else None,
            None,
        )


def _as_operator() -> bool:
    """Whether somebody looks at operators: a compiler, or a mode such as that of selective checkpointing. Otherwise
    the loops are called directly, which spares a small model the way through the dispatcher."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _entry(sums: Any, i: int, like: Any) -> Tensor | None:
    """The gradient of the i-th scalar in its shape, out of three sums in one tensor or of three tensors of rows."""
    if not isinstance(sums, Tensor):
        return sum_to(sums[i], like)
    grad = sums.narrow(0, i, 1)
    return grad if like.shape == (1,) and like.dtype == grad.dtype else grad.to(like.dtype).reshape(like.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, f, step, step_value, p, p_value, radius, radius_value, _ = inputs
    ctx.save_for_backward(h, f, output[2], step, p, radius)
    ctx.values = step_value, p_value, radius_value
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, g: Tensor | None, g2: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    h, f, kept, *tensors = ctx.saved_tensors
    present = [t for t in (g, g2) if t is not None and t.numel() == h.numel()]
    if not present:
        return (None,) * 9
    pairs = [part for pair in zip(tensors, ctx.values, strict=True) for part in pair]
    dh, df, sums = retract_rows_backward(present[0], present[1] if len(present) > 1 else None, h, f, kept, *pairs)
    ds, dp, dr = (None if like is None else _entry(sums, i, like) for i, like in enumerate(tensors))
    return dh, df, ds, None, dp, None, dr, None, None


torch.library.register_autograd("spheret::retract", _operator_backward, setup_context=_setup_context)
