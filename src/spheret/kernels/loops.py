"""The retraction as one loop over rows per direction, compiled by Numba: the row stays in L1, each tensor moves once.

Float32 rows, statistics in float32 within a range where no square can overflow or vanish, in float64 outside it.
Flags allow sums to be reordered (so that they vectorise) and multiply-adds to be fused, and keep NaN and infinity as
they are. The result does not depend on the number of threads: a row is one thread's work.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

FLAGS = {"reassoc", "contract", "arcp", "nsz"}
OPTIONS = {"fastmath": FLAGS, "error_model": "numpy", "cache": True, "nogil": True}
F32 = np.float32
SMALLEST, LARGEST = (
    1e-25,
    1e25,
)  # of |h|^2 and |f|^2: between them every product of float32 statistics is a normal number


@numba.njit(inline="always", **OPTIONS)
def _coefficients(beta, p):
    """cos(theta), sin(theta)/beta and d theta/d beta; p = inf is an ordinary value (u = 0)."""
    u = beta / p
    theta = beta if u < 1e-9 else p * math.atan(u)
    sinc = math.sin(theta) / beta if beta > 1e-18 else 1.0
    return math.cos(theta), sinc, 1.0 / (1.0 + u * u)


@numba.njit(inline="always", **OPTIONS)
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
    c += again
    if again * hz > F32(1e-6) * zz:
        zz = F32(0)
        for j in range(d):
            z = f[j] - c * h[j]
            zz += z * z
    return np.float64(hh), np.float64(c), np.float64(zz)


@numba.njit(**OPTIONS)
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


@numba.njit(inline="always", **OPTIONS)
def _forward_row(h, f, step, p, radius, out, stats):
    hh, c, zz = _statistics(h, f)
    stats[0], stats[1], stats[2] = hh, c, zz
    if hh == 0:  # no direction to rotate
        for j in range(h.shape[0]):
            out[j] = h[j]
        return
    cos, sinc, _ = _coefficients(abs(step) * math.sqrt(zz / hh), p)
    scale = radius / math.sqrt(hh) if radius > 0 else 1.0
    a, b = scale * cos, scale * sinc * step
    if SMALLEST < hh < LARGEST and zz < LARGEST and abs(c) < 1e12 and abs(b) < 1e18:
        a4, b4, c4 = F32(a), F32(b), F32(c)
        for j in range(h.shape[0]):
            out[j] = a4 * h[j] + b4 * (f[j] - c4 * h[j])
    else:
        for j in range(h.shape[0]):
            out[j] = a * h[j] + b * (np.float64(f[j]) - c * h[j])


@numba.njit(inline="always", **OPTIONS)
def _backward_row(g, h, f, step, p, radius, stats, dh, df, sums):
    """Gradients of one row; `sums` gets those of step, p and radius. The formulas are those of
    ``geometry.retract_vjp``."""
    d = h.shape[0]
    hh, c, zz = stats[0], stats[1], stats[2]
    sums[0], sums[1], sums[2] = 0.0, 0.0, 0.0
    if hh == 0:
        for j in range(d):
            dh[j], df[j] = 0.0, 0.0
        return
    plain = SMALLEST < hh < LARGEST and zz < LARGEST and abs(c) < 1e12
    gh, gz = 0.0, 0.0
    if plain:
        gh4, gz4, c4 = F32(0), F32(0), F32(c)
        for j in range(d):
            gh4 += g[j] * h[j]
            gz4 += g[j] * (f[j] - c4 * h[j])
        gh, gz = np.float64(gh4), np.float64(gz4)
    else:
        for j in range(d):
            gh += np.float64(g[j]) * h[j]
            gz += np.float64(g[j]) * (np.float64(f[j]) - c * h[j])
    beta = abs(step) * math.sqrt(zz / hh)
    cos, sinc, kappa = _coefficients(beta, p)
    a1 = gh / hh
    k = sinc * step
    m = -kappa * k * a1
    if zz > 0:
        m += (kappa * cos - sinc) * gz / zz
    scale = radius / math.sqrt(hh) if radius > 0 else 1.0
    # df = step (S g - S a1 h + m z),  dh = C g - c df - k a1 z - step m |z|^2/|h|^2 h (- the radial part of a given
    # radius)
    fg, fh, fz = scale * k, -scale * k * a1, scale * step * m
    hg, hz = scale * cos, -scale * k * a1
    hx = -scale * step * m * zz / hh
    if radius > 0:
        along = (cos * gh + k * gz) / math.sqrt(hh)
        sums[2] = along
        hx -= radius * along / hh
    sums[0] = scale * kappa * (cos * gz - k * zz * a1)
    if beta > 0 and p < 1e30:
        u = beta / p
        tau = (
            (u**3) * (2 / 3 - u * u * (4 / 5 - u * u * (6 / 7 - u * u * 8 / 9)))
            if u < 0.02
            else math.atan(u) - u / (1 + u * u)
        )
        sums[1] = scale * tau * (cos * gz * step / beta - sinc * beta * gh)
    if plain and abs(fz) < 1e18 and abs(hx) < 1e18 and abs(fg) < 1e18:
        fg4, fh4, fz4, c4 = F32(fg), F32(fh), F32(fz), F32(c)
        hg4, hz4, hx4 = F32(hg), F32(hz), F32(hx)
        for j in range(d):
            z = f[j] - c4 * h[j]
            q = fg4 * g[j] + fh4 * h[j] + fz4 * z
            df[j] = q
            dh[j] = hg4 * g[j] - c4 * q + hz4 * z + hx4 * h[j]
    else:
        for j in range(d):
            z = np.float64(f[j]) - c * h[j]
            q = fg * g[j] + fh * h[j] + fz * z
            df[j] = q
            dh[j] = hg * g[j] - c * q + hz * z + hx * h[j]


@numba.njit(parallel=True, **OPTIONS)
def forward(h, f, step, p, radius, out, stats):
    """Rows (n, d) of h and f; stats (n, 3) float64; radius 0 keeps the norm of h."""
    for i in numba.prange(h.shape[0]):
        _forward_row(h[i], f[i], step, p, radius, out[i], stats[i])


@numba.njit(parallel=True, **OPTIONS)
def backward(g, h, f, step, p, radius, stats, dh, df, sums):
    """Gradients of (n, d) rows; sums (n, 3) float64: per-row gradients of step, p and radius."""
    for i in numba.prange(h.shape[0]):
        _backward_row(g[i], h[i], f[i], step, p, radius, stats[i], dh[i], df[i], sums[i])
