"""How the size of an update becomes an angle: ``theta(beta) = p arctan(beta / p)``.

A retraction that commutes with rotations moves ``h`` within the plane of ``h`` and the tangent update ``w``. It is
therefore one scalar function ``theta(beta)`` of ``beta = |w| / |h|`` (Sphere Retraction Normalizations, arXiv
2608.02668). ``p = 1`` is the metric projection, ``p = 2`` the Cayley transform, ``p = inf`` the exponential map
(GeoNorm).

The retraction uses ``C = cos(theta)`` and ``S = sin(theta) / beta``. Both are even in beta, hence smooth functions of
``q = beta**2``. For p = 1/4, 1/2, 1, 3/2, 2, 3 and 4 they are algebraic and computed without trigonometry.
For ``p > 2`` the angle can exceed pi: a large step then rotates ``h`` past its antipode.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Exponent = float | Tensor
Angle = Callable[[Tensor], Tensor]
LOG_P_RANGE = (-3.0, 5.0)  # p from 0.05 to 148: outside this range, a change of p no longer changes the map in float32


def exponent_from_log(rho: Tensor) -> Tensor:
    """``p = exp(rho)`` with rho clamped to ``LOG_P_RANGE``, elementwise. The gradient passes through the clamp."""
    # A plain clamp has gradient 0 outside the range, so an exponent that reached its bound could never leave it.
    value = rho.detach()
    return (rho + (value.clamp(*LOG_P_RANGE) - value)).exp()


def angle(beta: Tensor, p: Exponent) -> Tensor:
    """``theta = p arctan(beta / p)`` in radians, elementwise.

    ``beta >= 0``. ``p`` lies in (0, inf] and is a float or a tensor that broadcasts.
    """
    if isinstance(p, float) and math.isinf(p):
        return beta
    # Written as beta * (arctan(u)/u) because p * arctan(u) would be inf * 0 where a tensor p is infinite.
    u = (beta / p).clamp_min(_tiny(beta))
    return beta * (torch.atan(u) / u)


def angle_slope(beta: Tensor, p: Exponent) -> Tensor:
    """``kappa = d theta / d beta = 1 / (1 + (beta/p)^2)``, elementwise."""
    if isinstance(p, float) and math.isinf(p):
        return torch.ones_like(beta)
    u = beta / p
    return 1 / (1 + u * u)


def angle_exponent_slope(beta: Tensor, p: Exponent) -> Tensor:
    """``tau = d theta / d p = arctan(u) - u / (1 + u^2)`` with ``u = beta / p``, elementwise.

    The two terms of the direct form cancel down to order ``u^3``. Below ``u = 0.1`` the alternating series
    ``sum (-1)^(k+1) 2k/(2k+1) u^(2k+1)`` is used instead.
    """
    u = beta / p
    direct = torch.atan(u) - u / (1 + u * u)
    # torch.where evaluates both forms: the clamp keeps the series finite where it is not used. Eight terms at
    # u <= 0.1 are exact to float64.
    v = u.clamp_max(_SERIES_BELOW)
    series = torch.zeros_like(v)
    for k in range(8, 0, -1):
        series = (2 * k / (2 * k + 1)) - v * v * series
    return torch.where(u < _SERIES_BELOW, v**3 * series, direct)


def cos_and_sinc(beta: Tensor, p: Exponent) -> tuple[Tensor, Tensor]:
    """``(C, S) = (cos theta, sin(theta) / beta)``, elementwise; finite and smooth at ``beta = 0``, where both are 1."""
    closed = _CLOSED_FORMS.get(p) if isinstance(p, float) else None
    if closed is not None:
        return closed(beta * beta)
    safe = beta.clamp_min(_tiny(beta))
    theta = angle(safe, p)
    return torch.cos(theta), torch.sin(theta) / safe


def cos_and_sinc_of(beta: Tensor, theta: Angle) -> tuple[Tensor, Tensor]:
    """``(C, S)`` as in ``cos_and_sinc``, for any scalar function ``theta(beta)`` with ``theta(0) = 0`` and unit slope
    at zero."""
    # The clamp also keeps a root or a quotient inside theta away from 0, where its derivative may be infinite.
    safe = beta.clamp_min(_tiny(beta))
    value = theta(safe)
    return torch.cos(value), torch.sin(value) / safe


_SERIES_BELOW = 0.1


def _tiny(like: Tensor) -> float:
    """Smallest angle that is distinguished from zero."""
    # Far above the smallest normal number, so that quotients by it do not overflow.
    return 1e-150 if like.dtype == torch.float64 else 1e-18


# --- closed forms (functions of q = beta^2); derivation: (1 + i beta/p)^p = (1 + q/p^2)^(p/2) exp(i theta) ---


def _quarter(q: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.rsqrt(1 + 16 * q)
    c2 = torch.sqrt((1 + k) / 2)
    c = torch.sqrt((1 + c2) / 2)
    return c, k / c2 / c


def _half(q: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.rsqrt(1 + 4 * q)
    c = torch.sqrt((1 + k) / 2)
    return c, k / c


def _one(q: Tensor) -> tuple[Tensor, Tensor]:
    u = torch.rsqrt(1 + q)
    return u, u


def _three_halves(q: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.rsqrt(1 + q * (4 / 9))
    c = torch.sqrt((1 + k) / 2)
    b = k / (3 * c)
    return c * (4 * c * c - 3), b * (3 - 4 * b * b * q)


def _two(q: Tensor) -> tuple[Tensor, Tensor]:
    u = 1 / (1 + q / 4)
    return 2 * u - 1, u


def _three(q: Tensor) -> tuple[Tensor, Tensor]:
    u = torch.rsqrt(1 + q / 9)
    x, y = u * u, u * u * q / 9  # cos^2 and sin^2 of theta/3: bounded, so a huge q cannot overflow
    return (x - 3 * y) * u, (x - y / 3) * u


def _four(q: Tensor) -> tuple[Tensor, Tensor]:
    u = 1 / (1 + q / 16)
    return 8 * u * u - 8 * u + 1, u * (2 * u - 1)


_CLOSED_FORMS: dict[float, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    0.25: _quarter,
    0.5: _half,
    1.0: _one,
    1.5: _three_halves,
    2.0: _two,
    3.0: _three,
    4.0: _four,
}
