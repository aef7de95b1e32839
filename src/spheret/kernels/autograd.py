"""The retraction as one autograd node: the operators if a kernel can run, else the formulas in PyTorch operations.

The next hidden state is read twice, by the next connection and by the next sublayer (the branch). Returned as two
outputs with the same values (the second in the sublayer's dtype), their gradients arrive separately, and the backward
kernel adds them in its pass over the rows. This costs one more read instead of a separate pass.

The node saves ``h`` and ``f``, which the neighbouring layers keep anyway, the scalars, and one float32 number per row
(eight on a GPU; none with the formulas, which compute the row statistics again).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spheret.geometry import Angle, compute_dtype, exponent_from_log, retract_rows, retract_vjp
from spheret.kernels.ops import kernels


class Retraction(torch.autograd.Function):
    """``apply(h, f, alpha, p, radius, theta, slope, lambda_l, log_p, branch_dtype, backend)`` -> h' if ``branch_dtype``
    is None, else h' for the stream and h' for the branch.

    The arguments are as in ``ops.retract``. ``backend`` is ``cpp``, ``triton``, or ``autograd`` for the formulas, which
    do not support theta.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        f: Tensor,
        alpha: Tensor,
        p: Tensor,
        radius: Tensor | None,
        theta: Tensor | None,
        slope: Tensor | None,
        lambda_l: float,
        log_p: bool,
        branch_dtype: torch.dtype | None,
        backend: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        branch: Any
        kept: Tensor | None = None
        # The same dtype needs no second tensor: a view of the first is an output with its own gradient.
        other_dtype = None if branch_dtype is h.dtype else branch_dtype
        if backend == "autograd":
            out = _formula(h, f, alpha, p, radius, lambda_l, log_p)
            branch = None if other_dtype is None else out.to(other_dtype)
        else:
            out, branch, kept = kernels(backend, h).retract(h, f, alpha, p, radius, lambda_l, log_p, theta, other_dtype)
        ctx.save_for_backward(h, f, alpha, p, radius, theta, slope, kept)
        ctx.settings = lambda_l, log_p, backend
        ctx.set_materialize_grads(False)
        if branch_dtype is None:
            return out
        return out, out.view_as(out) if other_dtype is None else branch

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_branch: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, f, alpha, p, radius, theta, slope, kept = ctx.saved_tensors
        lambda_l, log_p, backend = ctx.settings
        need_p = ctx.needs_input_grad[3]
        if g is None:
            g, g_branch = g_branch, None
        if g is None:
            return (None,) * 11
        # The kernels have no second derivative, so create_graph=True takes the formulas.
        if backend == "autograd" or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            if theta is not None:
                raise RuntimeError(
                    "a retraction with a custom angle function has first derivatives only: for create_graph=True, "
                    'force the formulas with `with spheret.backend("autograd"):`'
                )
            dtype = compute_dtype(h, f)
            total = g.to(dtype) if g_branch is None else g.to(dtype) + g_branch.to(dtype)
            grads = _formula_vjp(total, h, f, alpha, p, radius, lambda_l, log_p, need_p)
            return *grads, None, None, None, None, None, None
        dh, df, dalpha, dp, dradius, dtheta = kernels(backend, h).retract_backward(
            g, g_branch, h, f, kept, alpha, p, radius, lambda_l, log_p, theta, slope, need_p
        )
        of_radius, of_theta = None if radius is None else dradius, None if theta is None else dtheta.to(theta.dtype)
        return dh, df, dalpha, dp if need_p else None, of_radius, of_theta, None, None, None, None, None


def _formula(
    h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, radius: Tensor | None, lambda_l: float, log_p: bool
) -> Tensor:
    """``geometry.retract_rows`` for arguments of any dtype; the result has the dtype of h."""
    dtype = compute_dtype(h, f)
    step, exponent, r = _in_dtype(dtype, alpha, p, radius, lambda_l, log_p)
    return retract_rows(h.to(dtype), f.to(dtype), step, exponent, r).to(h.dtype)


def _formula_vjp(
    g: Tensor,
    h: Tensor,
    f: Tensor,
    alpha: Tensor,
    p: Tensor,
    radius: Tensor | None,
    lambda_l: float,
    log_p: bool,
    need_p: bool,
) -> tuple[Tensor | None, ...]:
    """``geometry.retract_vjp``, with every gradient in the shape and dtype of its argument. Differentiable itself."""
    dtype = compute_dtype(h, f)
    step, exponent, r = _in_dtype(dtype, alpha, p, radius, lambda_l, log_p)
    grads = retract_vjp(g, h.to(dtype), f.to(dtype), step, exponent, r, need_p=need_p)
    of_p = grads.p * exponent if log_p and grads.p is not None else grads.p
    scalars = (_sum_to(grads.step * lambda_l, alpha), _sum_to(of_p, p), _sum_to(grads.radius, radius))
    return grads.h.to(h.dtype), grads.f.to(f.dtype), *scalars


def _in_dtype(
    dtype: torch.dtype, alpha: Tensor, p: Tensor, radius: Tensor | None, lambda_l: float, log_p: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Step, exponent and radius in the dtype and form of the formulas."""
    exponent = exponent_from_log(p.to(dtype)) if log_p else p.to(dtype)
    return alpha.to(dtype) * lambda_l, exponent, None if radius is None else radius.to(dtype)


def _sum_to(per_row: Tensor | None, like: Any) -> Tensor | None:
    """Per-row gradients (..., 1), summed to the shape of their parameter."""
    return None if per_row is None else per_row.sum_to_size(like.shape).to(like.dtype)


# --- a custom angle function ---


def retract_with_angle(
    h: Tensor, f: Tensor, alpha: Tensor, angle: Angle, radius: Tensor | None, backend: str
) -> Tensor:
    """``geometry.retract_rows`` with ``angle``, by the kernels of ``backend``. It has first derivatives only.

    Args:
        h, f: (..., d), any floating dtypes.
        alpha, radius: tensors of one element, which may require grad.
        angle: elementwise ``theta(beta)`` in radians for ``beta`` (..., 1), with ``theta(0) = 0`` and unit slope at 0.

    Raises:
        RuntimeError: in the backward pass, if a second derivative is requested.
    """
    beta = kernels(backend, h).update_size(h.detach(), f.detach(), alpha.detach())
    # The angle function gets the same dtype as from the formulas.
    beta = beta.to(torch.float64 if torch.float64 in (h.dtype, f.dtype) else torch.float32)
    theta, slope = _angle_and_slope(angle, beta.reshape(*h.shape[:-1], 1))
    out: Tensor = Retraction.apply(
        h, f, alpha, alpha.detach(), radius, theta.flatten(), slope, 1.0, False, None, backend
    )
    return out


def _angle_and_slope(angle: Angle, beta: Tensor) -> tuple[Tensor, Tensor]:
    """theta, with the graph of any parameters inside ``angle``, and its slope (rows,), 1 if gradients are disabled."""
    # Clamped away from 0, where a root or a quotient inside the angle function may have no derivative.
    beta = beta.clamp_min(1e-150 if beta.dtype == torch.float64 else 1e-18)
    if not torch.is_grad_enabled():
        return angle(beta), torch.ones_like(beta).flatten()
    theta = angle(beta.requires_grad_())
    (slope,) = torch.autograd.grad(theta.sum(), beta, retain_graph=True)
    return theta, slope.flatten()
