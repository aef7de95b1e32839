"""C functions over the loops: ``void entry(int64_t *arguments)``, which any number of threads call at once with the
same arguments.

``arguments``: the next row to be taken, the blocks that are done, n, d; step, p, radius and whether p has a gradient,
as doubles; the number of threads; then the addresses of the arrays in the order in which an entry unpacks them, 0 for
one that is absent. A thread takes rows until none is left, a share of neighbours at a time: within it memory is read
ahead.
"""

# mypy: ignore-errors
from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numba
import numpy as np
from numba import carray, cfunc, types
from numba.extending import intrinsic

from spheret.kernels import lanes, loop_angles, loop_backward, loop_forward
from spheret.kernels.lanes import BYTES, WIDTH, pointer
from spheret.kernels.loop_angles import COMMON
from spheret.kernels.loop_backward import BLOCK, backward
from spheret.kernels.loop_forward import combine, forward, measure

SIGNATURE = types.void(types.CPointer(types.int64))
THREADS, ARRAYS = 8, 9  # where the number of threads is, and where the addresses begin
SHARES = 4  # of a thread, if all are equally fast
# Numbers from which dh is written past the caches: a whole sublayer's backward pass comes before anybody reads it. A
# thread's last `_take` orders these writes too.
LARGE = 1 << 21
CACHED = {**COMMON, "cache": True}
F32, F64 = np.float32, np.float64


@intrinsic
def _add(typing_context, arguments, index, amount):
    """The value of ``arguments[index]``, which is raised by ``amount``. What a thread wrote before its call is seen by
    those whose calls come later."""

    def build(context, builder, signature, values):
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), values[2], "acq_rel")

    return types.int64(arguments, types.int64, types.int64), build


@numba.njit(inline="always", **COMMON)
def _share(n, threads):
    """Rows that are taken at a time, a number of whole blocks."""
    return BLOCK * max(1, n // (BLOCK * SHARES * threads))


@numba.njit(inline="always", **COMMON)
def _take(arguments, share):
    """The first row of the next share: no two threads get the same."""
    return _add(arguments, 0, share)


@numba.njit(**COMMON)
def _add_up(arguments, done, sums, total):
    """Called by every thread with the blocks that it has done: the last adds up, in the order of the blocks."""
    blocks = sums.shape[0]
    if done == 0 or _add(arguments, 1, done) + done < blocks:
        return
    for k in range(3):
        s = 0.0
        for block in range(blocks):
            s += sums[block, k]
        total[k] = s


@numba.njit(inline="always", **COMMON)
def _array(address, rows, columns, dtype):
    return carray(pointer(address), (rows, columns), dtype)


@numba.njit(inline="always", **COMMON)
def _column(address, n):
    return carray(pointer(address), (n,), F32)


@numba.njit(inline="always", **COMMON)
def _scalars(a):
    values = a[4:THREADS].view(F64)
    return values[0], values[1], values[2], values[3] != 0


@numba.njit(inline="always", **COMMON)
def _arguments(counter, addresses):
    """All arguments but the addresses, and the addresses."""
    a = carray(counter, (ARRAYS + addresses,))
    return a[:ARRAYS], a[ARRAYS:]


def _forward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_forward(counter):
        _ = sources  # in the key of the cache
        a, b = _arguments(counter, 4)
        n, d, share = a[2], a[3], _share(a[2], a[THREADS])
        h, f, out, kept = b[0], b[1], b[2], _column(b[3], n)
        step, p, radius, _ = _scalars(a)
        rows, first = np.empty((6, BLOCK)), _take(counter, share)
        while first < n:
            forward(h, f, d, step, p, radius, out, kept, rows, first, min(n, first + share))
            first = _take(counter, share)

    return run_forward


def _measure(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_measure(counter):
        _ = sources
        a, b = _arguments(counter, 3)
        n, d, share = a[2], a[3], _share(a[2], a[THREADS])
        h, f, rows = b[0], b[1], _array(b[2], 6, n, F64)
        first = _take(counter, share)
        while first < n:
            last = min(n, first + share)
            measure(h, f, d, rows[:, first:last], f, first, last)  # no row will be written: one that is read stands in
            first = _take(counter, share)

    return run_measure


def _combine(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_combine(counter):
        _ = sources
        a, b = _arguments(counter, 5)
        n, d, share = a[2], a[3], _share(a[2], a[THREADS])
        h, f, rows, out, kept = b[0], b[1], _array(b[2], 6, n, F64), b[3], _column(b[4], n)
        step, _, radius, _ = _scalars(a)
        first = _take(counter, share)
        while first < n:
            last = min(n, first + share)
            combine(h, f, d, step, radius, rows[:, first:last], out, kept, first, last)
            first = _take(counter, share)

    return run_combine


@numba.njit(**COMMON)
def _backward_by_blocks(counter, a, g, g2, h, f, kept, angle, dh, df, sums, turns, total):
    """The work of both backward entries; ``g2``, ``angle`` and ``turns`` may be None, which is compiled apart."""
    n, d, share = a[2], a[3], _share(a[2], a[THREADS])
    results = dh, df, n * d >= LARGE and d % WIDTH == 0 and dh % BYTES == 0
    scalars, room = _scalars(a), (np.empty((6, BLOCK)), np.empty((10, BLOCK)))
    done, first = 0, _take(counter, share)
    while first < n:
        for i in range(first, min(n, first + share), BLOCK):
            last = min(n, i + BLOCK)
            backward(g, g2, h, f, d, kept, angle, scalars, results, sums, turns, room, i, last)
            done += 1
        first = _take(counter, share)
    _add_up(counter, done, sums, total)


def _backward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward(counter):
        _ = sources
        a, b = _arguments(counter, 9)
        n, g, g2, h, f, dh, df = a[2], b[0], b[1], b[2], b[3], b[5], b[6]
        kept, sums = _column(b[4], n), _array(b[7], (n + BLOCK - 1) // BLOCK, 3, F64)
        total = _column(b[8], 3)
        if g2 != 0:
            _backward_by_blocks(counter, a, g, g2, h, f, kept, None, dh, df, sums, None, total)
        else:
            _backward_by_blocks(counter, a, g, None, h, f, kept, None, dh, df, sums, None, total)

    return run_backward


def _backward_with_angle(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward_with_angle(counter):
        _ = sources
        a, b = _arguments(counter, 10)
        n, g, h, f, dh, df = a[2], b[0], b[1], b[2], b[5], b[6]
        kept, angle, turns = _column(b[3], n), _array(b[4], 3, n, F64), carray(pointer(b[8]), (n,), F64)
        sums, total = _array(b[7], (n + BLOCK - 1) // BLOCK, 3, F64), _column(b[9], 3)
        _backward_by_blocks(counter, a, g, None, h, f, kept, angle, dh, df, sums, turns, total)

    return run_backward_with_angle


_BUILDERS = {
    "forward": _forward,
    "measure": _measure,
    "combine": _combine,
    "backward": _backward,
    "backward_with_angle": _backward_with_angle,
}


@functools.cache
def entry(name):
    """The compiled function; its code lives as long as the cache holds it."""
    return _BUILDERS[name](_sources())


@functools.cache
def _sources():
    """Digest of the loops' text. Numba keeps compiled code on disk by the file of the function alone and would not see
    that a function which it calls has changed; a closure variable is part of its key."""
    texts = (Path(module.__file__).read_bytes() for module in (lanes, loop_angles, loop_forward, loop_backward))
    return hashlib.sha256(b"".join(texts)).hexdigest()
