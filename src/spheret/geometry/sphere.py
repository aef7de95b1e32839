"""Row geometry: scale, radius, and the part of an update that is tangent to the sphere through ``h``.

Each row (the last dimension) is one token. Row statistics are float32, or float64 where an input is float64. A row is
divided by a power of two, about its largest absolute entry, before anything is squared: rows of size 1e-30 or 1e+30
are as exact as ordinary ones, and the division rounds nothing. The map is homogeneous, ``R(c h, c f) = c R(h, f)``, so
the scale of ``h`` is one factor at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Row quantities of ``h`` and ``f`` that the forward and backward pass share; row scalars have shape (..., 1).

    ``x = h/a``, ``y = f/b``, ``c = <x,y>/|x|^2``, ``z = y - c x`` (tangent, formed explicitly), ``t = step * b/a``,
    so that the tangent update ``w = step (f - <h,f>/|h|^2 h)`` equals ``a t z`` and ``beta = |w|/|h| = |t| |z|/|x|``.
    """

    x: Tensor  # (..., d)
    z: Tensor  # (..., d)
    a: Tensor  # scale of h
    b: Tensor  # scale of f
    c: Tensor  # radial coefficient
    t: Tensor  # step relative to the scaled rows
    rho2: Tensor  # |x|^2, at least 1
    nu2: Tensor  # |z|^2
    beta: Tensor


_EXPONENT_BITS = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of row statistics: float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def row_scale(h: Tensor) -> Tensor:
    """The largest absolute entry of each row, rounded down to a power of two, (..., d) -> (..., 1); at least the
    smallest normal number."""
    # Detached: the scale cancels in the result, so its gradient would be zero in exact arithmetic.
    largest = h.detach().abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(h.dtype).tiny)
    # Without the bits of its mantissa a number is a power of two. exp2(floor(log2)) is not exact on every device.
    integer, exponent_bits = _EXPONENT_BITS[h.dtype]
    return (largest.view(integer) & exponent_bits).view(h.dtype)


def rows(h: Tensor, f: Tensor, step: Tensor | float) -> Rows:
    """The scaled row quantities of a hidden state and an update.

    Args:
        h, f: (..., d) in the compute dtype.
        step: signed step size ``alpha * lambda``, a float or a tensor that broadcasts to (..., 1).
    """
    a = row_scale(h)
    b = row_scale(f)
    b = torch.where(b > torch.finfo(f.dtype).tiny, b, a)  # f = 0: any scale works; the scale of h gives t = step
    x, y = h / a, f / b
    # The largest entry of x is at least 1, so the clamp acts only on h = 0, which has no direction.
    rho2 = (x * x).sum(-1, keepdim=True).clamp_min(1.0)
    c = (x * y).sum(-1, keepdim=True) / rho2
    z = _less(y, c, x)
    # If f is parallel to h up to rounding, z is pure noise with a radial part as large as its tangent part. A second
    # Gram-Schmidt step ("twice is enough") removes the radial part, so the norm of h' is exact there too.
    again = (x * z).sum(-1, keepdim=True) / rho2
    z, c = z - again * x, c + again
    nu2 = (z * z).sum(-1, keepdim=True)
    t = (step * (b / a).clamp_max(torch.finfo(f.dtype).max)).clamp(-max_step(f.dtype), max_step(f.dtype))
    t = has_direction(a) * t
    # The square root has no derivative at 0, so its argument is clamped; the factor (nu2 > 0) restores the exact zero.
    # The root of the quotient, because the root of rho2 itself rounds with a bias just below a power of two, where
    # |h| = sqrt(d) may be, and a thousand connections would add that up.
    beta = (nu2 > 0) * t.abs() * torch.sqrt((nu2 / rho2).clamp_min(torch.finfo(f.dtype).tiny))
    return Rows(x=x, z=z, a=a, b=b, c=c, t=t, rho2=rho2, nu2=nu2, beta=beta)


def _less(y: Tensor, c: Tensor, x: Tensor) -> Tensor:
    """``y - c x``, rounded once."""
    # Where f is nearly parallel to h, z is as small as the rounding error of the product in float32.
    if x.device.type == "mps":  # MPS has no float64
        return y - c * x
    return (y.double() - c.double() * x.double()).to(y.dtype)


def max_step(dtype: torch.dtype) -> float:
    """Bound on the relative step ``t``: its square still fits the dtype, and the angle of every finite p has long
    saturated."""
    return 1e150 if dtype == torch.float64 else 1e16


def norm(h: Tensor) -> Tensor:
    """Row norms without overflow or underflow, (..., d) -> (..., 1) in the compute dtype; a zero row has gradient 0."""
    h = h.to(compute_dtype(h))
    a = row_scale(h)
    x = h / a
    return has_direction(a) * a * torch.sqrt((x * x).sum(-1, keepdim=True).clamp_min(1.0))


def has_direction(scale: Tensor) -> Tensor:
    """Whether a row of this scale counts as nonzero (in float32: an entry of at least 2.4e-38). A zero hidden state has
    no direction and is not moved."""
    return scale > torch.finfo(scale.dtype).tiny
