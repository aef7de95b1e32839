"""Gradients of the retraction as one loop over rows; the formulas are those of ``geometry.retract_vjp``.

With ``rows`` of :mod:`spheret.kernels.loop_forward`: df = fg g + fh h + fz z and dh = hg g - c df + fh z + hx h, where
<g,h> and <g,z> enter the factors. Sums over rows are taken in blocks of fixed size, whatever the number of threads.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

from spheret.kernels.loop_angles import SUMS, angles, exponent_slope
from spheret.kernels.loop_forward import F32, F64, group_of, measure_wide_row, plain, tangent_square

BLOCK = 32  # rows whose gradients of step, p and radius are summed together
GH, GZ, FG, FH, FZ, HG, HX, SLOPE, TURN, ALONG = range(10)  # rows of ``factors`` (10, group)


@numba.njit(inline="always", **SUMS)
def _incoming(g, g2, i, j):
    """The gradient of the row, of one reader or of both; which of them is settled when the loop is compiled."""
    if g2 is None:
        return g[i, j]
    else:
        return g[i, j] + g2[i, j]


@numba.njit(**SUMS)
def _measure_row(g, g2, h, f, i, c1, c2):
    """|h|^2, c, |z|^2, <g,h> and <g,z> of row i, for the c of the forward pass."""
    hh, zz, gh, gz = F32(0), F32(0), F32(0), F32(0)
    for j in range(h.shape[1]):
        x, z = _incoming(g, g2, i, j), f[i, j] - c1 * h[i, j]
        hh += h[i, j] * h[i, j]
        zz += z * z
        gh += x * h[i, j]
        gz += x * z
    c, radial = F64(c1) + F64(c2), c2 * c2 * hh
    if radial > F32(1e-6) * zz:
        zz = tangent_square(h, f, i, c1, c2)
    # Also where a square vanished: z = 0 is told from a z too small to be squared by measuring it again.
    if not plain(hh, c, zz) or zz < 1e-25:
        return _measure_wide_gradient(g, g2, h, f, i)
    return F64(hh), c, F64(zz), F64(gh), F64(gz) - F64(c2) * F64(gh)


@numba.njit(**SUMS)
def _measure_wide_gradient(g, g2, h, f, i):
    hh, c, zz = measure_wide_row(h, f, i)
    gh, gz = 0.0, 0.0
    for j in range(h.shape[1]):
        x = F64(_incoming(g, g2, i, j))
        gh += x * h[i, j]
        gz += x * (f[i, j] - c * h[i, j])
    return hh, c, zz, gh, gz


@numba.njit(**SUMS)
def _measure(g, g2, h, f, kept, rows, factors, start, stop):
    for i in range(start, stop):
        r = i - start
        rows[0, r], rows[1, r], rows[2, r], factors[GH, r], factors[GZ, r] = _measure_row(
            g, g2, h, f, i, kept[0, i], kept[1, i]
        )


@numba.njit(**SUMS)
def _derive(rows, step, radius, factors, count):
    """The factors of the gradients, and each row's gradients of step, theta and radius."""
    keeps_norm = math.isnan(radius)
    for i in range(count):
        hh, zz, cos, sinc, kappa = rows[0, i], rows[2, i], rows[3, i], rows[4, i], rows[5, i]
        gh, gz = factors[GH, i], factors[GZ, i]
        inverse = 1 / hh if hh > 0 else 0.0
        a1, k = gh * inverse, sinc * step
        root = math.sqrt(inverse)
        scale = 1.0 if keeps_norm else radius * root
        along = 0.0 if keeps_norm else (cos * gh + k * gz) * root
        m = -kappa * k * a1 + (kappa * cos - sinc) * (gz / zz if zz > 0 else 0.0)
        beta = abs(step) * math.sqrt(zz) * root
        factors[FG, i], factors[FH, i], factors[FZ, i] = scale * k, -scale * k * a1, scale * step * m
        factors[HG, i], factors[HX, i] = scale * cos, -scale * (step * m * zz * inverse + along * root)
        factors[SLOPE, i] = scale * kappa * (cos * gz - k * zz * a1)
        factors[TURN, i] = scale * (cos * gz * step / beta - sinc * beta * gh) if beta > 0 else 0.0
        factors[ALONG, i] = along


@numba.njit(**SUMS)
def _write(g, g2, h, f, radius, rows, factors, dh, df, start, stop):
    for i in range(start, stop):
        r = i - start
        hh, c, zz = rows[0, r], rows[1, r], rows[2, r]
        fg, fh, fz, hg, hx = factors[FG, r], factors[FH, r], factors[FZ, r], factors[HG, r], factors[HX, r]
        c1 = F32(c)
        rest = c - c1  # what float32 does not hold of c
        if plain(hh, c, zz) and abs(fz) < 1e18 and abs(hx) < 1e18 and abs(fg) < 1e18:
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
def backward(g, g2, h, f, kept, angle, step, p, radius, learns_p, dh, df, sums, turns, first, last):
    """Gradients dh, df (n, d) for those of the output, ``g`` and, unless None, ``g2``.

    ``angle`` (3, n), unless None: cos(theta), sin(theta)/beta and d theta/d beta in place of those of p.
    ``sums[block]``: gradients of step, p (0 unless ``learns_p``) and radius over the rows [first, last) of one block;
    ``turns`` (n,), written with ``angle`` alone: d loss / d theta.
    """
    group = group_of(h.shape[1], last - first)
    rows, factors = np.empty((6, group)), np.empty((10, group))
    ds, dp, dr = 0.0, 0.0, 0.0
    for start in range(first, last, group):
        stop = min(last, start + group)
        _measure(g, g2, h, f, kept, rows, factors, start, stop)
        if angle is None:
            angles(rows, step, p, stop - start)
        else:
            rows[3:, : stop - start] = angle[:, start:stop]
        _derive(rows, step, radius, factors, stop - start)
        _write(g, g2, h, f, radius, rows, factors, dh, df, start, stop)
        for r in range(stop - start):
            alive = rows[0, r] > 0
            ds += factors[SLOPE, r] if alive else 0.0
            dr += factors[ALONG, r] if alive else 0.0
            if angle is not None:
                turns[start + r] = factors[TURN, r] if alive else 0.0
            elif learns_p and alive:
                beta = abs(step) * math.sqrt(rows[2, r] / rows[0, r])
                dp += factors[TURN, r] * exponent_slope(beta / p)
    block = first // BLOCK
    sums[block, 0], sums[block, 1], sums[block, 2] = ds, dp, dr
