"""The retraction as one loop over rows, compiled by Numba: each tensor moves once, rows stay in the cache.

Float32 rows, statistics in float32 within a range where no square can overflow or vanish, in float64 outside it. Sums
may be reordered, so that they vectorise; NaN and infinity keep their meaning. A row is the work of one thread, so no
result depends on the number of threads. Small groups of rows are measured, then turned into coefficients together
(which vectorises), then written while they are in the cache.

``h``, ``f`` and the like are addresses of the first of n rows of d float32 numbers: an array that is handed from
function to function costs a small row more than its arithmetic.

Of a row the loops need six numbers, ``rows`` (6, group) in float64: |h|^2, c = <h,f>/|h|^2 and |z|^2 with z = f - c h;
cos(theta), sin(theta)/beta and d theta/d beta. Only c is kept for the backward, rounded to float32: what is missing of
it, and the others, come out of the pass that the backward makes anyway.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

from spheret.kernels.lanes import (
    BYTES,
    WIDTH,
    load,
    load_rest,
    numbers,
    prefetch,
    prefetch_to_write,
    splat,
    store,
    store_rest,
    total,
    whole,
)
from spheret.kernels.loop_angles import COMMON, SUMS, angles

GROUP = 1024  # numbers of h that are measured before they are written
LEAST = 4  # rows to a group: the angles of four are computed at once
F32, F64 = np.float32, np.float64
# Of |h|^2 and |f|^2: between them every product of float32 statistics is a normal number.
SMALLEST, LARGEST = 1e-25, 1e25


@numba.njit(**SUMS)
def _measure_row(h, f, d, out):
    """|h|^2, c and |z|^2 of the rows at h and f, the tangent part z = f - c h formed explicitly; the row at ``out`` is
    about to be written."""
    end, rest, zero = whole(d), d % WIDTH, splat(F32(0))
    squares, products = zero, zero
    for j in range(0, end, BYTES):
        x = load(h + j)
        prefetch_to_write(out + j)
        squares, products = squares + x * x, products + x * load(f + j)
    if rest:
        x = load_rest(h + end, rest)
        squares, products = squares + x * x, products + x * load_rest(f + end, rest)
    hh = total(squares)
    if not SMALLEST < hh < LARGEST:
        return measure_wide_row(numbers(h, d), numbers(f, d))
    c = total(products) / hh
    radial, squares = splat(c), zero
    for j in range(0, end, BYTES):
        z = load(f + j) - radial * load(h + j)
        squares = squares + z * z
    if rest:
        z = load_rest(f + end, rest) - radial * load_rest(h + end, rest)
        squares = squares + z * z
    zz = total(squares)
    if zz > hh * c * c and SMALLEST < zz < LARGEST:
        return F64(hh), F64(c), F64(zz)
    return measure_steep_row(numbers(h, d), numbers(f, d), hh, c, zz)


@numba.njit(**SUMS)
def measure_steep_row(h, f, hh, c, zz):
    """The same where the update is more radial than tangent: what rounding left of the radial part in z is taken out
    once more (second Gram-Schmidt step), since noise is partly radial."""
    along = hh * c * c
    if not SMALLEST < zz + along < LARGEST:
        return measure_wide_row(h, f)
    hz = F32(0)
    for j in range(h.size):
        hz += h[j] * (f[j] - c * h[j])
    again = hz / hh
    if again * hz > F32(1e-6) * zz:
        zz = tangent_square(h, f, c, again)
    return F64(hh), F64(c) + F64(again), F64(zz)


@numba.njit(**{**COMMON, "fastmath": {"contract"}})
def tangent_square(h, f, c1, c2):
    """|(f - c1 h) - c2 h|^2 of the rows h and f (d,), two subtractions; slow, and rarely asked for."""
    zz = F32(0)
    for j in range(h.size):
        z = (f[j] - c1 * h[j]) - c2 * h[j]
        zz += z * z
    return zz


@numba.njit(**SUMS)
def measure_wide_row(h, f):
    """|h|^2, c and |z|^2 of the rows h and f (d,) in float64, whose range holds the squares of all float32 numbers."""
    hh, hf = 0.0, 0.0
    for j in range(h.size):
        hh += F64(h[j]) * h[j]
        hf += F64(h[j]) * f[j]
    c = hf / hh if hh > 0 else 0.0
    zz = 0.0
    for j in range(h.size):
        z = F64(f[j]) - c * h[j]
        zz += z * z
    return hh, c, zz


@numba.njit(inline="always", **SUMS)
def plain(hh, c, zz):
    """Whether float32 holds all that is computed from the row."""
    return SMALLEST < hh < LARGEST and zz < LARGEST and abs(c) < 1e12


@numba.njit(**SUMS)
def measure(h, f, d, rows, out, start, stop):
    """The first three of ``rows``, for rows [start, stop)."""
    for i in range(start, stop):
        r, at = i - start, 4 * d * i
        rows[0, r], rows[1, r], rows[2, r] = _measure_row(h + at, f + at, d, out + at)


@numba.njit(**SUMS)
def _write_row(h, f, out, d, a, b, c, ahead):
    """The row at ``out`` = a h + b (f - c h); those ``ahead`` bytes behind h and f are wanted next."""
    end, rest = whole(d), d % WIDTH
    a, b, c = splat(a), splat(b), splat(c)
    for j in range(0, end, BYTES):
        x = load(h + j)
        prefetch(h + j + ahead)
        prefetch(f + j + ahead)
        store(out + j, a * x + b * (load(f + j) - c * x))
    if rest:
        x = load_rest(h + end, rest)
        store_rest(out + end, a * x + b * (load_rest(f + end, rest) - c * x), rest)


@numba.njit(**SUMS)
def _write_wide_row(h, f, out, hh, a, b, c):
    """The same for rows (d,), in float64; a row of zeros has no direction to rotate and stays."""
    for j in range(h.size):
        out[j] = a * h[j] + b * (f[j] - c * h[j]) if hh > 0 else h[j]


@numba.njit(**SUMS)
def combine(h, f, d, step, radius, rows, out, kept, start, stop):
    """``out`` = (radius/|h|) (C h + S step z); a radius of NaN keeps the norm of h. ``kept`` (n,): c, rounded."""
    ahead = 4 * d * (stop - start)
    for i in range(start, stop):
        r, at = i - start, 4 * d * i
        hh, c, zz = rows[0, r], rows[1, r], rows[2, r]
        scale = 1.0 if math.isnan(radius) else radius / math.sqrt(hh)
        a, b = scale * rows[3, r], scale * rows[4, r] * step
        c1 = F32(c)
        kept[i] = c1
        if plain(hh, c, zz) and abs(b) < 1e18:
            # The part of c that float32 does not hold is taken out of h's coefficient, where it costs nothing.
            _write_row(h + at, f + at, out + at, d, F32(a - b * (c - c1)), F32(b), c1, ahead)
        else:
            _write_wide_row(numbers(h + at, d), numbers(f + at, d), numbers(out + at, d), hh, a, b, c)


@numba.njit(**SUMS)
def group_of(d, size, most):
    """Rows to a group of ``size`` numbers of h: they, and what they are combined with, stay in the cache."""
    return min(most, max(LEAST, size // d))


@numba.njit(**SUMS)
def forward(h, f, d, step, p, radius, out, kept, rows, first, last):
    """Rows [first, last) of h and f -> those of ``out`` and ``kept`` (n,); ``rows`` (6, at least a group) is room."""
    group = group_of(d, GROUP, min(rows.shape[1], last - first))
    for start in range(first, last, group):
        stop = min(last, start + group)
        measure(h, f, d, rows, out, start, stop)
        angles(rows, step, p, stop - start)
        combine(h, f, d, step, radius, rows, out, kept, start, stop)
