"""The retraction as one loop over rows per direction, compiled by Numba: each tensor moves once, rows stay in L1.

Float32 rows, statistics in float32 within a range where no square can overflow or vanish, in float64 outside it. Sums
may be reordered, so that they vectorise; NaN and infinity keep their meaning. A row is the work of one thread, and sums
over rows are taken in blocks of fixed size: no result depends on the number of threads. Within a block, small groups
of rows are measured, then turned into coefficients together (which vectorises), then written while they are in L1.

Of each row six numbers are kept (``stats``, (6, n) float64): |h|^2, c = <h,f>/|h|^2, |z|^2 with z = f - c h, and
cos(theta), sin(theta)/beta, d theta/d beta. The backward needs no more, so it serves every angle function.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

from spheret.kernels.loop_angles import COMMON, SUMS, angles, exponent_slope

BLOCK = 32  # rows whose gradients of step, p and radius are summed together
GROUP = 2048  # numbers of h that are measured before they are written: 8 KB, and as much of f
F32, F64 = np.float32, np.float64
# Of |h|^2 and |f|^2: between them every product of float32 statistics is a normal number.
SMALLEST, LARGEST = 1e-25, 1e25


@numba.njit(**SUMS)
def _measure_row(h, f, i):
    """|h|^2, c and |z|^2 of row i, the tangent part z = f - c h formed explicitly."""
    hh, ff, hf = F32(0), F32(0), F32(0)
    for j in range(h.shape[1]):
        hh += h[i, j] * h[i, j]
        ff += f[i, j] * f[i, j]
        hf += h[i, j] * f[i, j]
    if not (SMALLEST < hh < LARGEST and ff < LARGEST) or 0 < ff < SMALLEST:
        return _measure_wide_row(h, f, i)
    c = hf / hh
    zz, hz = F32(0), F32(0)
    for j in range(h.shape[1]):
        z = f[i, j] - c * h[i, j]
        zz += z * z
        hz += h[i, j] * z
    again = hz / hh  # second Gram-Schmidt step: z is noise where f is parallel to h, and noise is partly radial
    if again * hz > F32(1e-6) * zz:
        zz = _tangent_square(h, f, i, c, again)
    return F64(hh), F64(c) + F64(again), F64(zz)


@numba.njit(**{**COMMON, "fastmath": {"contract"}})
def _tangent_square(h, f, i, c1, c2):
    """|(f - c1 h) - c2 h|^2, two subtractions; slow, and rarely asked for."""
    zz = F32(0)
    for j in range(h.shape[1]):
        z = (f[i, j] - c1 * h[i, j]) - c2 * h[i, j]
        zz += z * z
    return zz


@numba.njit(**SUMS)
def _measure_wide_row(h, f, i):
    """The same in float64, whose range holds the squares of all float32 numbers."""
    hh, hf = 0.0, 0.0
    for j in range(h.shape[1]):
        hh += F64(h[i, j]) * h[i, j]
        hf += F64(h[i, j]) * f[i, j]
    c = hf / hh if hh > 0 else 0.0
    zz = 0.0
    for j in range(h.shape[1]):
        z = F64(f[i, j]) - c * h[i, j]
        zz += z * z
    return hh, c, zz


@numba.njit(inline="always", **SUMS)
def _plain(hh, c, zz):
    """Whether float32 holds all that is computed from the row."""
    return SMALLEST < hh < LARGEST and zz < LARGEST and abs(c) < 1e12


@numba.njit(**SUMS)
def measure(h, f, stats, first, last):
    """The first three rows of ``stats``, for rows [first, last) of h and f (n, d)."""
    for i in range(first, last):
        stats[0, i], stats[1, i], stats[2, i] = _measure_row(h, f, i)


@numba.njit(**SUMS)
def combine(h, f, step, radius, out, stats, first, last):
    """``out`` = (radius/|h|) (C h + S step z) for given ``stats``; a radius of NaN keeps the norm of h."""
    for i in range(first, last):
        hh, c = stats[0, i], stats[1, i]
        scale = 1.0 if math.isnan(radius) else radius / math.sqrt(hh)
        a, b = scale * stats[3, i], scale * stats[4, i] * step
        c1 = F32(c)
        if _plain(hh, c, stats[2, i]) and abs(b) < 1e18:
            # The part of c that float32 does not hold is taken out of h's coefficient, where it costs nothing.
            a32, b32 = F32(a - b * (c - c1)), F32(b)
            for j in range(h.shape[1]):
                out[i, j] = a32 * h[i, j] + b32 * (f[i, j] - c1 * h[i, j])
        elif hh == 0:  # no direction to rotate
            for j in range(h.shape[1]):
                out[i, j] = h[i, j]
        else:
            for j in range(h.shape[1]):
                out[i, j] = a * h[i, j] + b * (f[i, j] - c * h[i, j])


@numba.njit(**SUMS)
def forward(h, f, step, p, radius, out, stats, first, last):
    """Rows [first, last) of h, f (n, d) -> out (n, d) and stats (6, n)."""
    group = max(1, GROUP // h.shape[1])
    for start in range(first, last, group):
        stop = min(last, start + group)
        measure(h, f, stats, start, stop)
        angles(stats, step, p, start, stop)
        combine(h, f, step, radius, out, stats, start, stop)


# --- backward ---


@numba.njit(inline="always", **SUMS)
def _incoming(g, g2, i, j):
    """The gradient of the row, of one reader or of both; which of them is settled when the loop is compiled."""
    if g2 is None:
        return g[i, j]
    else:
        return g[i, j] + g2[i, j]


@numba.njit(**SUMS)
def _gradient_dots(g, g2, h, f, i, c, zero):
    """<g,h> and <g, f - c h> of row i, in the precision of `zero`."""
    gh, gz = zero, zero
    for j in range(h.shape[1]):
        x = _incoming(g, g2, i, j)
        gh += x * h[i, j]
        gz += x * (f[i, j] - c * h[i, j])
    return F64(gh), F64(gz)


@numba.njit(**SUMS)
def _measure_gradients(g, g2, h, f, stats, dots, start, stop):
    """``dots`` (2, group): <g,h> and <g,z> of each row."""
    for i in range(start, stop):
        c = stats[1, i]
        if _plain(stats[0, i], c, stats[2, i]):
            gh, gz = _gradient_dots(g, g2, h, f, i, F32(c), F32(0))
            gz -= (c - F32(c)) * gh
        else:
            gh, gz = _gradient_dots(g, g2, h, f, i, c, 0.0)
        dots[0, i - start], dots[1, i - start] = gh, gz


FG, FH, FZ, HG, HX, SLOPE, TURN, ALONG = range(8)


@numba.njit(**SUMS)
def _gradient_factors(stats, step, radius, dots, factors, start, stop):
    """Factors of df = fg g + fh h + fz z and dh = hg g - c df + fh z + hx h, and each row's gradients of step, theta
    and radius. The formulas are those of ``geometry.retract_vjp``."""
    keeps_norm = math.isnan(radius)
    h_square, z_square = stats[0][start:stop], stats[2][start:stop]
    cosine, sinus, slope = stats[3][start:stop], stats[4][start:stop], stats[5][start:stop]
    g_h, g_z = dots[0], dots[1]
    f1, f2, f3, h1, h2 = factors[FG], factors[FH], factors[FZ], factors[HG], factors[HX]
    by_step, by_angle, by_radius = factors[SLOPE], factors[TURN], factors[ALONG]
    for i in range(stop - start):
        hh, zz, cos, sinc, kappa = h_square[i], z_square[i], cosine[i], sinus[i], slope[i]
        gh, gz = g_h[i], g_z[i]
        inverse = 1 / hh if hh > 0 else 0.0
        a1, k = gh * inverse, sinc * step
        root = math.sqrt(inverse)
        scale = 1.0 if keeps_norm else radius * root
        along = 0.0 if keeps_norm else (cos * gh + k * gz) * root
        m = -kappa * k * a1 + (kappa * cos - sinc) * (gz / zz if zz > 0 else 0.0)
        beta = abs(step) * math.sqrt(zz) * root
        f1[i], f2[i], f3[i] = scale * k, -scale * k * a1, scale * step * m
        h1[i], h2[i] = scale * cos, -scale * (step * m * zz * inverse + along * root)
        by_step[i] = scale * kappa * (cos * gz - k * zz * a1)
        by_angle[i] = scale * (cos * gz * step / beta - sinc * beta * gh) if beta > 0 else 0.0
        by_radius[i] = along


@numba.njit(**SUMS)
def _write_gradients(g, g2, h, f, stats, radius, factors, dh, df, start, stop):
    for i in range(start, stop):
        r = i - start
        hh, c = stats[0, i], stats[1, i]
        fg, fh, fz, hg, hx = factors[FG, r], factors[FH, r], factors[FZ, r], factors[HG, r], factors[HX, r]
        c1 = F32(c)
        rest = c - c1  # what float32 does not hold of c
        if _plain(hh, c, stats[2, i]) and abs(fz) < 1e18 and abs(hx) < 1e18 and abs(fg) < 1e18:
            f1, f2, f3 = F32(fg), F32(fh - fz * rest), F32(fz)
            h1, h2, h3 = F32(hg), F32(fh), F32(hx - fh * rest)
            for j in range(h.shape[1]):
                x, z = _incoming(g, g2, i, j), f[i, j] - c1 * h[i, j]
                q = f1 * x + f2 * h[i, j] + f3 * z
                df[i, j] = q
                dh[i, j] = h1 * x - c1 * q + h2 * z + h3 * h[i, j]
        elif hh > 0:
            for j in range(h.shape[1]):
                x, z = F64(_incoming(g, g2, i, j)), f[i, j] - c * h[i, j]
                q = fg * x + fh * h[i, j] + fz * z
                df[i, j] = q
                dh[i, j] = hg * x - c * q + fh * z + hx * h[i, j]
        else:
            passes = F32(1 if math.isnan(radius) else 0)  # without a direction the row was left alone
            for j in range(h.shape[1]):
                df[i, j] = F32(0)
                dh[i, j] = passes * _incoming(g, g2, i, j)


@numba.njit(**SUMS)
def backward(g, g2, h, f, stats, step, p, radius, dh, df, sums, turns, first, last):
    """Gradients dh, df (n, d) for those of the output, ``g`` and, unless None, ``g2``; ``sums[block]``: gradients of
    step, p and radius over the rows [first, last) of one block, that of p unless p is NaN or infinite; ``turns`` (n,):
    d loss / d theta."""
    group = min(BLOCK, max(1, GROUP // h.shape[1]))
    dots, factors = np.empty((2, group)), np.empty((8, group))
    ds, dp, dr = 0.0, 0.0, 0.0
    for start in range(first, last, group):
        stop = min(last, start + group)
        _measure_gradients(g, g2, h, f, stats, dots, start, stop)
        _gradient_factors(stats, step, radius, dots, factors, start, stop)
        _write_gradients(g, g2, h, f, stats, radius, factors, dh, df, start, stop)
        for i in range(start, stop):
            alive = stats[0, i] > 0
            ds += factors[SLOPE, i - start] if alive else 0.0
            dr += factors[ALONG, i - start] if alive else 0.0
            turns[i] = factors[TURN, i - start] if alive else 0.0
            if p < 1e30 and alive:
                beta = abs(step) * math.sqrt(stats[2, i] / stats[0, i])
                dp += factors[TURN, i - start] * exponent_slope(beta / p)
    block = first // BLOCK
    sums[block, 0], sums[block, 1], sums[block, 2] = ds, dp, dr
