"""The retraction as one loop over rows per direction, compiled by Numba: the row stays in L1, each tensor moves once.

Float32 rows, statistics in float32 within a range where no square can overflow or vanish, in float64 outside it. Sums
may be reordered, so that they vectorise; NaN and infinity keep their meaning. A row is the work of one thread and of
one compiled function, so the result does not depend on the number of threads.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

COMMON = {"error_model": "numpy", "cache": True, "nogil": True}
SUMS = {**COMMON, "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
# Where rows are written, f - c1 h - c2 h must stay the two subtractions that it is: multiply-adds, but no reordering.
WRITES = {**COMMON, "fastmath": {"contract"}}
F32 = np.float32
SMALLEST, LARGEST = (
    1e-25,
    1e25,
)  # of |h|^2 and |f|^2: between them every product of float32 statistics is a normal number


@numba.njit(inline="always", **SUMS)
def _coefficients(beta, p):
    """cos(theta), sin(theta)/beta and d theta/d beta; p = inf is an ordinary value (u = 0)."""
    u = beta / p
    theta = beta if u < 1e-9 else p * math.atan(u)
    sinc = math.sin(theta) / beta if beta > 1e-18 else 1.0
    return math.cos(theta), sinc, 1.0 / (1.0 + u * u)


@numba.njit(inline="always", **SUMS)
def _statistics(h, f):
    """|h|^2, the radial coefficient c = <h,f>/|h|^2 and |z|^2 of the tangent part z = f - c h, formed explicitly."""
    d = h.shape[0]
    hh, ff, hf = F32(0), F32(0), F32(0)
    for j in range(d):
        hh += h[j] * h[j]
        ff += f[j] * f[j]
        hf += h[j] * f[j]
    if not (SMALLEST < hh < LARGEST and (ff < LARGEST)) or (0 < ff < SMALLEST):
        return _wide_statistics(h, f)
    c = hf / hh
    zz, hz = F32(0), F32(0)
    for j in range(d):
        z = f[j] - c * h[j]
        zz += z * z
        hz += h[j] * z
    again = hz / hh  # second Gram-Schmidt step: z is noise where f is parallel to h, and noise is partly radial
    if again * hz > F32(1e-6) * zz:
        zz = _tangent_square(h, f, c, again)
    return np.float64(hh), np.float64(c) + np.float64(again), np.float64(zz)


@numba.njit(**WRITES)
def _tangent_square(h, f, c1, c2):
    """|f - c1 h - c2 h|^2; slow, and rarely asked for."""
    zz = F32(0)
    for j in range(h.shape[0]):
        z = (f[j] - c1 * h[j]) - c2 * h[j]
        zz += z * z
    return zz


@numba.njit(**SUMS)
def _wide_statistics(h, f):
    """The same in float64, whose range holds the squares of all float32 numbers."""
    hh, hf = 0.0, 0.0
    for j in range(h.shape[0]):
        hh += np.float64(h[j]) * h[j]
        hf += np.float64(h[j]) * f[j]
    c = hf / hh if hh > 0 else 0.0
    zz = 0.0
    for j in range(h.shape[0]):
        z = np.float64(f[j]) - c * h[j]
        zz += z * z
    return hh, c, zz


@numba.njit(**WRITES)
def _write_forward(h, f, a, b, c1, c2, out):
    """a h + b (f - (c1 + c2) h); c in two parts, since a float32 c leaves 6e-8 c |h| of f's radial part in the
    update."""
    for j in range(h.shape[0]):
        out[j] = a * h[j] + b * ((f[j] - c1 * h[j]) - c2 * h[j])


@numba.njit(**WRITES)
def _write_backward(g, h, f, c1, c2, fg, fh, fz, hg, hf, hz, hx, dh, df):
    """df = fg g + fh h + fz z and dh = hg g - hf df + hz z + hx h with the tangent part z."""
    for j in range(h.shape[0]):
        z = (f[j] - c1 * h[j]) - c2 * h[j]
        q = fg * g[j] + fh * h[j] + fz * z
        df[j] = q
        dh[j] = hg * g[j] - hf * q + hz * z + hx * h[j]


@numba.njit(**SUMS)
def _dots(g, h, f, c1, c2, zero):
    """<g,h> and <g,z>, in the precision of `zero`."""
    gh, gz = zero, zero
    for j in range(h.shape[0]):
        gh += g[j] * h[j]
        gz += g[j] * ((f[j] - c1 * h[j]) - c2 * h[j])
    return np.float64(gh), np.float64(gz)


@numba.njit(**SUMS)
def _forward_row(h, f, step, p, radius, out, stats):
    hh, c, zz = _statistics(h, f)
    stats[0], stats[1], stats[2] = hh, c, zz
    if hh == 0:  # no direction to rotate
        for j in range(h.shape[0]):
            out[j] = h[j]
        return
    cos, sinc, _ = _coefficients(abs(step) * math.sqrt(zz / hh), p)
    scale = 1.0 if math.isnan(radius) else radius / math.sqrt(hh)
    a, b = scale * cos, scale * sinc * step
    if _plain(hh, c, zz) and abs(b) < 1e18:
        c1 = F32(c)
        _write_forward(h, f, F32(a), F32(b), c1, F32(c - c1), out)
    else:
        _write_forward(h, f, a, b, c, 0.0, out)


@numba.njit(inline="always", **SUMS)
def _plain(hh, c, zz):
    """Whether float32 holds all that is computed from the row."""
    return SMALLEST < hh < LARGEST and zz < LARGEST and abs(c) < 1e12


@numba.njit(**SUMS)
def _backward_row(g, h, f, step, p, radius, stats, dh, df, sums):
    """Gradients of one row; `sums` gets those of step, p and radius. The formulas are those of
    ``geometry.retract_vjp``."""
    hh, c, zz = stats[0], stats[1], stats[2]
    sums[0], sums[1], sums[2] = 0.0, 0.0, 0.0
    if hh == 0:
        for j in range(h.shape[0]):
            dh[j], df[j] = g[j] if math.isnan(radius) else F32(0), 0.0
        return
    plain = _plain(hh, c, zz)
    c1 = F32(c)
    gh, gz = _dots(g, h, f, c1, F32(c - c1), F32(0)) if plain else _dots(g, h, f, c, 0.0, 0.0)
    beta = abs(step) * math.sqrt(zz / hh)
    cos, sinc, kappa = _coefficients(beta, p)
    a1 = gh / hh
    k = sinc * step
    m = -kappa * k * a1
    if zz > 0:
        m += (kappa * cos - sinc) * gz / zz
    scale = 1.0 if math.isnan(radius) else radius / math.sqrt(hh)
    fg, fh, fz = scale * k, -scale * k * a1, scale * step * m
    hg, hz, hx = scale * cos, -scale * k * a1, -scale * step * m * zz / hh
    if not math.isnan(radius):
        along = (cos * gh + k * gz) / math.sqrt(hh)
        sums[2] = along
        hx -= scale * along / math.sqrt(hh)
    sums[0] = scale * kappa * (cos * gz - k * zz * a1)
    if beta > 0 and p < 1e30:
        sums[1] = scale * _exponent_slope(beta / p) * (cos * gz * step / beta - sinc * beta * gh)
    if plain and abs(fz) < 1e18 and abs(hx) < 1e18 and abs(fg) < 1e18:
        _write_backward(g, h, f, c1, F32(c - c1), F32(fg), F32(fh), F32(fz), F32(hg), c1, F32(hz), F32(hx), dh, df)
    else:
        _write_backward(g, h, f, c, 0.0, fg, fh, fz, hg, c, hz, hx, dh, df)


@numba.njit(inline="always", **SUMS)
def _exponent_slope(u):
    """d theta / d p = arctan(u) - u/(1 + u^2), by its series where that cancels."""
    if u < 0.02:
        return u**3 * (2 / 3 - u * u * (4 / 5 - u * u * (6 / 7 - u * u * 8 / 9)))
    return math.atan(u) - u / (1 + u * u)


@numba.njit(**SUMS)
def forward(h, f, step, p, radius, out, stats):
    """Rows (n, d) of h and f; stats (n, 3) float64; a radius that is NaN keeps the norm of h."""
    for i in range(h.shape[0]):
        _forward_row(h[i], f[i], step, p, radius, out[i], stats[i])


@numba.njit(**SUMS)
def backward(g, h, f, step, p, radius, stats, dh, df, sums):
    """Gradients of (n, d) rows; sums (n, 3) float64: per-row gradients of step, p and radius."""
    for i in range(h.shape[0]):
        _backward_row(g[i], h[i], f[i], step, p, radius, stats[i], dh[i], df[i], sums[i])
