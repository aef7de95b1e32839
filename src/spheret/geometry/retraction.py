r"""The sphere retraction and its derivative, as pure functions.

With ``c = <h,f>/|h|^2``, ``w = s (f - c h)``, ``beta = |w|/|h|`` and ``theta(beta)``:

    h' = C h + S w,    C = cos(theta),    S = sin(theta)/beta,    |h'| = |h|        (arXiv 2608.02668, unified update)

With a given radius, ``h' = (radius/|h|) (C h + S w)``. This re-projection costs one more factor and removes the
rounding error of earlier layers.

The vector-Jacobian product is written by hand. It takes two more row reductions and one more pass than the forward map,
and never divides by a quantity that can vanish.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spheret.geometry.angles import Angle, Exponent, angle_exponent_slope, angle_slope, cos_and_sinc, cos_and_sinc_of
from spheret.geometry.sphere import Rows, has_direction, max_step, rows


class Gradients(NamedTuple):
    """Gradients of one retraction.

    ``step``, ``p`` and ``radius`` are per row, (..., 1): the caller sums them to the shape of the parameter.
    """

    h: Tensor
    f: Tensor
    step: Tensor
    p: Tensor | None
    radius: Tensor | None


def retract_rows(
    h: Tensor,
    f: Tensor,
    step: Tensor | float,
    p: Exponent,
    radius: Tensor | float | None = None,
    angle: Angle | None = None,
) -> Tensor:
    """``h`` rotated towards the tangent part of ``f``, (..., d) in the compute dtype. Autograd can differentiate it."""
    r = rows(h, f, step)
    cos, sinc = _rotation(r.beta, p) if angle is None else cos_and_sinc_of(r.beta, angle)
    return _moved(h, r, cos, sinc, radius)


def _rotation(beta: Tensor, p: Exponent) -> tuple[Tensor, Tensor]:
    """``cos_and_sinc`` computed in float64 and rounded once."""
    # In float32 the error of C^2 + q S^2 = 1 has the same sign in every layer for a given p, and the norm would drift
    # by half a unit in the last place per layer.
    if beta.device.type == "mps":  # MPS has no float64
        return cos_and_sinc(beta, p)
    cos, sinc = cos_and_sinc(beta.double(), p.double() if isinstance(p, Tensor) else p)
    return cos.to(beta.dtype), sinc.to(beta.dtype)


def _moved(h: Tensor, r: Rows, cos: Tensor, sinc: Tensor, radius: Tensor | float | None) -> Tensor:
    """``C h + S w``, times ``radius / |h|`` where a radius is given."""
    # Without a radius C multiplies h itself, not a x: a row with w = 0 then keeps its exact bits.
    if radius is None:
        return cos * h + (r.a * (sinc * r.t)) * r.z
    factor = radius * torch.rsqrt(r.rho2)
    return (factor * cos) * r.x + (factor * (sinc * r.t)) * r.z


def retract_vjp(
    g: Tensor, h: Tensor, f: Tensor, step: Tensor | float, p: Exponent, radius: Tensor | float | None, *, need_p: bool
) -> Gradients:
    """Gradients of ``<g, h'>`` with respect to h, f, step, p and radius; all tensors in the compute dtype.

    With the scaled rows x, z, t of :class:`Rows`: ``a1 = <g,x>/|x|^2``, ``e = <g,z>``, ``k = S t``, ``kappa = theta'``:

        df/s  = S (g - a1 x) + m z,                     m = -kappa k a1 + (kappa C - S) e/|z|^2
        dh    = C g - c t (df/s) - k a1 z - t m |z|^2/|x|^2 x
        ds    = b kappa (C e - k |z|^2 a1)
        dp    = a tau (-S beta <g,x> + C e t/beta)
    """
    r = rows(h, f, step)
    cos, sinc = cos_and_sinc(r.beta, p)
    kappa = angle_slope(r.beta, p)
    # z = 0 gives e = 0, so a clamped |z|^2 makes the quotients 0 instead of NaN.
    smallest = torch.finfo(g.dtype).tiny
    gx = (g * r.x).sum(-1, keepdim=True)
    e = (g * r.z).sum(-1, keepdim=True)
    a1 = gx / r.rho2
    k = sinc * r.t
    m = (kappa * cos - sinc) * (e / r.nu2.clamp_min(smallest)) - kappa * k * a1
    df_over_s = sinc * g - (sinc * a1) * r.x + m * r.z
    dh = cos * g - (r.c * r.t) * df_over_s - (k * a1) * r.z - (r.t * m * r.nu2 / r.rho2) * r.x
    alive = has_direction(r.a)
    ds = alive * r.b * kappa * (cos * e - k * r.nu2 * a1)
    # Where ``rows`` clamped t, the step that acted is smaller than ``step``: recover it from t.
    effective = torch.where(r.t.abs() < max_step(g.dtype), step * torch.ones_like(r.t), r.t * (r.a / r.b))
    df = alive * effective * df_over_s
    dp = None
    if need_p:
        tau = angle_exponent_slope(r.beta, p)
        t_over_beta = torch.sign(r.t) * torch.sqrt(r.rho2) * torch.rsqrt(r.nu2.clamp_min(smallest))
        dp = r.a * tau * (cos * e * t_over_beta - sinc * r.beta * gx)
    if radius is None:
        return Gradients(dh, df, ds, dp, None)
    along = (cos * gx + k * e) * torch.rsqrt(r.rho2)  # <g, h'> / radius
    scale = torch.where(alive, radius / (r.a * torch.sqrt(r.rho2)), 0.0)
    dh = scale * dh - (scale * along * torch.rsqrt(r.rho2)) * r.x
    return Gradients(dh, scale * df, scale * ds, None if dp is None else scale * dp, along)
