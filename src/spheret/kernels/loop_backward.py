"""Gradients of the retraction as one loop over rows; the formulas are those of ``geometry.retract_vjp``.

With ``rows`` of :mod:`spheret.kernels.loop_forward`: df = fg g + fh h + fz z and dh = hg g - c df + fh z + hx h, where
<g,h> and <g,z> enter the factors. Sums over rows are taken in blocks of fixed size, whatever the number of threads.
``g``, ``g2``, ``h``, ``f``, ``dh`` and ``df`` are addresses; ``g2`` is None where one gradient arrives, which is
settled when the loop is compiled.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba

from spheret.kernels.lanes import (
    BYTES,
    WIDTH,
    load,
    load_rest,
    numbers,
    prefetch_to_write,
    splat,
    store,
    store_past,
    store_rest,
    total,
    whole,
)
from spheret.kernels.loop_angles import COMMON, SUMS, angles, exponent_slope, update_size
from spheret.kernels.loop_forward import F32, F64, group_of, measure_steep_row, measure_wide_row, plain

# Numbers of h to a group. Where its angles vectorise, a group's four rows to read and two to write do not fit the first
# cache; the second holds many more.
GROUP = 12288
BLOCK = 32  # rows whose gradients of step, p and radius are summed together
GH, GZ, FG, FH, FZ, HG, HX, SLOPE, TURN, ALONG = range(10)  # rows of ``factors`` (10, group)


@numba.njit(**COMMON)
def _shifted(g2, offset):
    return None if g2 is None else g2 + offset


@numba.njit(**COMMON)
def _load(g, g2, j):
    if g2 is None:
        return load(g + j)
    else:
        return load(g + j) + load(g2 + j)


@numba.njit(**COMMON)
def _load_rest(g, g2, end, rest):
    if g2 is None:
        return load_rest(g + end, rest)
    else:
        return load_rest(g + end, rest) + load_rest(g2 + end, rest)


@numba.njit(**COMMON)
def _number(g, g2, j):
    if g2 is None:
        return F64(numbers(g, j + 1)[j])
    else:
        return F64(numbers(g, j + 1)[j] + numbers(g2, j + 1)[j])


@numba.njit(**SUMS)
def _measure_row(g, g2, h, f, d, c1, dh, df):
    """|h|^2, c, |z|^2, <g,h> and <g,z> of the rows at the addresses, for the c of the forward pass, rounded; those at
    dh and df are about to be written."""
    end, rest = whole(d), d % WIDTH
    radial, zero = splat(c1), splat(F32(0))
    hs, zs, along, across = zero, zero, zero, zero
    for j in range(0, end, BYTES):
        x, y = _load(g, g2, j), load(h + j)
        prefetch_to_write(dh + j)
        prefetch_to_write(df + j)
        z = load(f + j) - radial * y
        hs, zs, along, across = hs + y * y, zs + z * z, along + x * y, across + x * z
    if rest:
        x, y = _load_rest(g, g2, end, rest), load_rest(h + end, rest)
        z = load_rest(f + end, rest) - radial * y
        hs, zs, along, across = hs + y * y, zs + z * z, along + x * y, across + x * z
    hh, zz, gh, gz = total(hs), total(zs), total(along), total(across)
    squared, c, tangent = F64(hh), F64(c1), F64(zz)
    if not zz > hh * c1 * c1:
        squared, c, tangent = measure_steep_row(numbers(h, d), numbers(f, d), hh, c1, zz)
    # Also where a square vanished: z = 0 is told from a z too small to be squared by measuring it again.
    if not plain(squared, c, tangent) or tangent < 1e-25:
        return _measure_wide_row(g, g2, numbers(h, d), numbers(f, d))
    return squared, c, tangent, F64(gh), F64(gz) - (c - F64(c1)) * F64(gh)


@numba.njit(**SUMS)
def _measure_wide_row(g, g2, h, f):
    hh, c, zz = measure_wide_row(h, f)
    gh, gz = 0.0, 0.0
    for j in range(h.size):
        x = _number(g, g2, j)
        gh += x * h[j]
        gz += x * (f[j] - c * h[j])
    return hh, c, zz, gh, gz


@numba.njit(**SUMS)
def _measure(g, g2, h, f, d, kept, rows, factors, dh, df, start, stop):
    for i in range(start, stop):
        r, at = i - start, 4 * d * i
        rows[0, r], rows[1, r], rows[2, r], factors[GH, r], factors[GZ, r] = _measure_row(
            g + at, _shifted(g2, at), h + at, f + at, d, kept[i], dh + at, df + at
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
def _write_row(g, g2, h, f, dh, df, d, for_f, for_h, c, past):
    """The rows at df = f1 g + f2 h + f3 z and dh = h1 g - c df + h2 z + h3 h, with z = f - c h. ``past``: dh is written
    past the caches."""
    end, rest, c = whole(d), d % WIDTH, splat(c)
    f1, f2, f3 = splat(for_f[0]), splat(for_f[1]), splat(for_f[2])
    h1, h2, h3 = splat(for_h[0]), splat(for_h[1]), splat(for_h[2])
    for j in range(0, end, BYTES):
        x, y = _load(g, g2, j), load(h + j)
        z = load(f + j) - c * y
        q = f1 * x + f2 * y + f3 * z
        store(df + j, q)
        q = h1 * x - c * q + h2 * z + h3 * y
        if past:
            store_past(dh + j, q)
        else:
            store(dh + j, q)
    if rest:
        x, y = _load_rest(g, g2, end, rest), load_rest(h + end, rest)
        z = load_rest(f + end, rest) - c * y
        q = f1 * x + f2 * y + f3 * z
        store_rest(df + end, q, rest)
        store_rest(dh + end, h1 * x - c * q + h2 * z + h3 * y, rest)


@numba.njit(**SUMS)
def _write_wide_row(g, g2, h, f, dh, df, for_f, for_h, c):
    """The same in float64, of rows (d,)."""
    for j in range(h.size):
        x, z = _number(g, g2, j), f[j] - c * h[j]
        q = for_f[0] * x + for_f[1] * h[j] + for_f[2] * z
        df[j] = q
        dh[j] = for_h[0] * x - c * q + for_h[1] * z + for_h[2] * h[j]


@numba.njit(**SUMS)
def _write_still_row(g, g2, dh, df, passes):
    """A row of h without a direction was left alone."""
    for j in range(dh.size):
        df[j] = 0
        dh[j] = _number(g, g2, j) if passes else 0.0


@numba.njit(**SUMS)
def _write(g, g2, h, f, d, radius, rows, factors, results, start, stop):
    dh, df, past = results
    for i in range(start, stop):
        r, at = i - start, 4 * d * i
        hh, c, zz = rows[0, r], rows[1, r], rows[2, r]
        fg, fh, fz, hg, hx = factors[FG, r], factors[FH, r], factors[FZ, r], factors[HG, r], factors[HX, r]
        g_at, g2_at = g + at, _shifted(g2, at)
        if plain(hh, c, zz) and abs(fz) < 1e18 and abs(hx) < 1e18 and abs(fg) < 1e18:
            c1 = F32(c)
            rest = c - c1  # what float32 does not hold of c
            for_f, for_h = (F32(fg), F32(fh - fz * rest), F32(fz)), (F32(hg), F32(fh), F32(hx - fh * rest))
            _write_row(g_at, g2_at, h + at, f + at, dh + at, df + at, d, for_f, for_h, c1, past)
        elif hh > 0:
            h_at, f_at, dh_at, df_at = numbers(h + at, d), numbers(f + at, d), numbers(dh + at, d), numbers(df + at, d)
            _write_wide_row(g_at, g2_at, h_at, f_at, dh_at, df_at, (fg, fh, fz), (hg, fh, hx), c)
        else:
            _write_still_row(g_at, g2_at, numbers(dh + at, d), numbers(df + at, d), math.isnan(radius))


@numba.njit(**SUMS)
def _exponent_gradient(rows, factors, step, p, count):
    """d loss / d p of a group of rows; a loop apart from the other sums, so that it vectorises."""
    gradient = 0.0
    for i in range(count):
        gradient += factors[TURN, i] * exponent_slope(update_size(rows, step, i) / p) if rows[0, i] > 0 else 0.0
    return gradient


@numba.njit(**SUMS)
def backward(g, g2, h, f, d, kept, angle, scalars, results, sums, turns, room, first, last):
    """Gradients for those of the output, ``g`` and, unless None, ``g2``, of the rows [first, last) of one block.

    ``angle`` (3, n), unless None: cos(theta), sin(theta)/beta and d theta/d beta in place of those of p.
    ``scalars``: step, p, radius and whether p has a gradient. ``results``: dh, df and whether dh is written past the
    caches, for which its rows begin at multiples of 64 bytes. ``sums[block]``: gradients of step, p (0 unless it has
    one) and radius; ``turns`` (n,), written with ``angle`` alone: d loss / d theta. ``room``: ``rows`` (6, at least a
    group) and ``factors`` (10, at least a group).
    """
    step, p, radius, learns_p = scalars
    dh, df, past = results
    rows, factors = room
    group = group_of(d, GROUP, last - first)
    ds, dp, dr = 0.0, 0.0, 0.0
    for start in range(first, last, group):
        stop = min(last, start + group)
        _measure(g, g2, h, f, d, kept, rows, factors, df if past else dh, df, start, stop)
        if angle is None:
            angles(rows, step, p, stop - start)
        else:
            rows[3:, : stop - start] = angle[:, start:stop]
        _derive(rows, step, radius, factors, stop - start)
        _write(g, g2, h, f, d, radius, rows, factors, results, start, stop)
        for r in range(stop - start):
            alive = rows[0, r] > 0
            ds += factors[SLOPE, r] if alive else 0.0
            dr += factors[ALONG, r] if alive else 0.0
            if angle is not None:
                turns[start + r] = factors[TURN, r] if alive else 0.0
        if learns_p:
            dp += _exponent_gradient(rows, factors, step, p, stop - start)
    block = first // BLOCK
    sums[block, 0], sums[block, 1], sums[block, 2] = ds, dp, dr
