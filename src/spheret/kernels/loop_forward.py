"""The retraction as one loop over rows, compiled by Numba: each tensor moves once, rows stay in L1.

Float32 rows, statistics in float32 within a range where no square can overflow or vanish, in float64 outside it. Sums
may be reordered, so that they vectorise; NaN and infinity keep their meaning. A row is the work of one thread, so no
result depends on the number of threads. Small groups of rows are measured, then turned into coefficients together
(which vectorises), then written while they are in L1.

Of a row the loops need six numbers, ``rows`` (6, group) in float64: |h|^2, c = <h,f>/|h|^2 and |z|^2 with z = f - c h;
cos(theta), sin(theta)/beta and d theta/d beta. Only c is kept for the backward, in two float32 parts: the others come
out of the pass that the backward makes anyway.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

from spheret.kernels.loop_angles import COMMON, SUMS, angles

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
        return measure_wide_row(h, f, i)
    c = hf / hh
    zz, hz = F32(0), F32(0)
    for j in range(h.shape[1]):
        z = f[i, j] - c * h[i, j]
        zz += z * z
        hz += h[i, j] * z
    again = hz / hh  # second Gram-Schmidt step: z is noise where f is parallel to h, and noise is partly radial
    if again * hz > F32(1e-6) * zz:
        zz = tangent_square(h, f, i, c, again)
    return F64(hh), F64(c) + F64(again), F64(zz)


@numba.njit(**{**COMMON, "fastmath": {"contract"}})
def tangent_square(h, f, i, c1, c2):
    """|(f - c1 h) - c2 h|^2, two subtractions; slow, and rarely asked for."""
    zz = F32(0)
    for j in range(h.shape[1]):
        z = (f[i, j] - c1 * h[i, j]) - c2 * h[i, j]
        zz += z * z
    return zz


@numba.njit(**SUMS)
def measure_wide_row(h, f, i):
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
def plain(hh, c, zz):
    """Whether float32 holds all that is computed from the row."""
    return SMALLEST < hh < LARGEST and zz < LARGEST and abs(c) < 1e12


@numba.njit(**SUMS)
def measure(h, f, rows, start, stop):
    """The first three of ``rows``, for rows [start, stop) of h and f (n, d)."""
    for i in range(start, stop):
        rows[0, i - start], rows[1, i - start], rows[2, i - start] = _measure_row(h, f, i)


@numba.njit(**SUMS)
def combine(h, f, step, radius, rows, out, kept, start, stop):
    """``out`` = (radius/|h|) (C h + S step z); a radius of NaN keeps the norm of h. ``kept`` (2, n): c in two parts."""
    for i in range(start, stop):
        hh, c, zz = rows[0, i - start], rows[1, i - start], rows[2, i - start]
        scale = 1.0 if math.isnan(radius) else radius / math.sqrt(hh)
        a, b = scale * rows[3, i - start], scale * rows[4, i - start] * step
        c1 = F32(c)
        kept[0, i], kept[1, i] = c1, F32(c - c1)
        if plain(hh, c, zz) and abs(b) < 1e18:
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


@numba.njit(inline="always", **SUMS)
def group_of(d, most):
    """Rows to a group: they and what they are combined with stay in L1."""
    return min(most, max(1, GROUP // d))


@numba.njit(**SUMS)
def forward(h, f, step, p, radius, out, kept, first, last):
    """Rows [first, last) of h, f (n, d) -> out (n, d) and kept (2, n)."""
    group = group_of(h.shape[1], last - first)
    rows = np.empty((6, group))
    for start in range(first, last, group):
        stop = min(last, start + group)
        measure(h, f, rows, start, stop)
        angles(rows, step, p, stop - start)
        combine(h, f, step, radius, rows, out, kept, start, stop)
