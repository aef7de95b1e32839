"""The retraction with an angle function of the caller's: two fast passes over the rows, PyTorch in between.

The first pass makes ``beta`` of every row, PyTorch evaluates ``theta(beta)`` and its slope on (rows,) numbers, and the
second pass writes the result. ``theta`` enters the second pass as an input with a gradient of its own, which reaches
the tensors that the angle function closes over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spheret.geometry import Angle
from spheret.kernels.autograd import save, saved
from spheret.kernels.cpu import Scalar
from spheret.kernels.operator import kernels


def retract_with_angle(h: Tensor, f: Tensor, step: Scalar, angle: Angle, radius: Scalar = None) -> Tensor:
    """``geometry.retract_rows`` with ``angle``, by the compiled loops or kernels; it has first derivatives only.

    Args:
        h, f: (..., d), any floating dtypes.
        step, radius: floats, or tensors of one element, which may require grad.
        angle: elementwise ``theta(beta)`` in radians with ``theta(0) = 0`` and unit slope there, of a tensor (..., 1).

    Raises:
        RuntimeError: a second derivative, in the backward pass.
    """
    stats, beta = kernels(h).measure(h, f, step)
    theta, kappa = _angle_and_slope(angle, beta.reshape(*h.shape[:-1], 1))
    out: Tensor = _AtAngle.apply(h, f, step, radius, theta, kappa, stats, beta)
    return out


def _angle_and_slope(angle: Angle, beta: Tensor) -> tuple[Tensor, Tensor]:
    """theta with the graph of what the function closes over, and its slope (rows,), 1 where nobody asks."""
    # Never 0 itself, where the root or quotient of an angle function may have no derivative.
    beta = beta.clamp_min(1e-150 if beta.dtype == torch.float64 else 1e-18)
    if not torch.is_grad_enabled():
        return angle(beta), torch.ones_like(beta).flatten()
    theta = angle(beta.requires_grad_())
    (kappa,) = torch.autograd.grad(theta.sum(), beta, retain_graph=True)
    return theta, kappa.flatten()


class _AtAngle(torch.autograd.Function):
    """``apply(h, f, step, radius, theta, kappa, stats, beta)``."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        f: Tensor,
        step: Scalar,
        radius: Scalar,
        theta: Tensor,
        kappa: Tensor,
        stats: Tensor,
        beta: Tensor,
    ) -> Tensor:
        out: Tensor = kernels(h).combine(h, f, stats, beta, theta.detach().flatten(), kappa, step, radius)
        save(ctx, (h, f, kappa, stats), step, None, radius)
        ctx.theta = theta.shape, theta.dtype
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a retraction with an angle function of its own has first derivatives only: create_graph=True needs "
                "SPHERET_BACKEND=autograd"
            )
        h, f, kappa, stats, step, _, radius = saved(ctx)
        dh, df, sums, turns = kernels(h).backward_with_angle(g, h, f, stats, kappa, step, radius)
        shape, dtype = ctx.theta
        wanted = ctx.needs_input_grad

        def shaped(grad: Tensor, like: Any) -> Tensor:
            return grad.to(like.dtype).reshape(like.shape)

        return (
            dh,
            df,
            shaped(sums[0], step) if wanted[2] else None,
            shaped(sums[2], radius) if wanted[3] else None,
            turns.reshape(shape).to(dtype) if wanted[4] else None,
            *(None,) * 3,
        )
