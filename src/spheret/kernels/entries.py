"""C functions over the loops: ``void entry(int64_t *arguments)``, which any number of threads call at once with the
same arguments.

``arguments``: the next block of rows to be taken, the blocks that are done, n, d; step, p, radius and whether p has a
gradient, as doubles; then the addresses of the arrays in the order in which an entry unpacks them, 0 for one that is
absent. A thread takes blocks until none is left.
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
from spheret.kernels.lanes import pointer
from spheret.kernels.loop_angles import COMMON
from spheret.kernels.loop_backward import BLOCK, backward
from spheret.kernels.loop_forward import combine, forward, measure

SIGNATURE = types.void(types.CPointer(types.int64))
ARRAYS = 8  # where the addresses begin
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
def _take(arguments):
    """The first row of the next block: no two threads get the same."""
    return _add(arguments, 0, 1) * BLOCK


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
def _scalars(a):
    values = a[4:ARRAYS].view(F64)
    return values[0], values[1], values[2], values[3] != 0


def _forward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_forward(counter):
        _ = sources  # in the key of the cache
        a = carray(counter, (ARRAYS + 4,))
        n, d, h, f, out, kept = a[2], a[3], a[8], a[9], a[10], _array(a[11], 2, a[2], F32)
        step, p, radius, _ = _scalars(a)
        rows, first = np.empty((6, BLOCK)), _take(counter)
        while first < n:
            forward(h, f, d, step, p, radius, out, kept, rows, first, min(n, first + BLOCK))
            first = _take(counter)

    return run_forward


def _measure(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_measure(counter):
        _ = sources
        a = carray(counter, (ARRAYS + 3,))
        n, d, h, f, rows = a[2], a[3], a[8], a[9], _array(a[10], 6, a[2], F64)
        first = _take(counter)
        while first < n:
            last = min(n, first + BLOCK)
            measure(h, f, d, rows[:, first:last], first, last)
            first = _take(counter)

    return run_measure


def _combine(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_combine(counter):
        _ = sources
        a = carray(counter, (ARRAYS + 5,))
        n, d, h, f, rows = a[2], a[3], a[8], a[9], _array(a[10], 6, a[2], F64)
        out, kept = a[11], _array(a[12], 2, n, F32)
        step, _, radius, _ = _scalars(a)
        first = _take(counter)
        while first < n:
            last = min(n, first + BLOCK)
            combine(h, f, d, step, radius, rows[:, first:last], out, kept, first, last)
            first = _take(counter)

    return run_combine


@numba.njit(**COMMON)
def _backward_by_blocks(counter, g, g2, h, f, kept, angle, dh, df, sums, turns, total):
    """The work of both backward entries; ``g2``, ``angle`` and ``turns`` may be None, which is compiled apart."""
    a = carray(counter, (ARRAYS,))
    n, d, (step, p, radius, learns_p) = a[2], a[3], _scalars(a)
    rows, factors, done, first = np.empty((6, BLOCK)), np.empty((10, BLOCK)), 0, _take(counter)
    while first < n:
        last = min(n, first + BLOCK)
        backward(
            g, g2, h, f, d, kept, angle, step, p, radius, learns_p, dh, df, sums, turns, rows, factors, first, last
        )
        done, first = done + 1, _take(counter)
    _add_up(counter, done, sums, total)


def _backward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward(counter):
        _ = sources
        a = carray(counter, (ARRAYS + 9,))
        n, g, g2, h, f, dh, df = a[2], a[8], a[9], a[10], a[11], a[13], a[14]
        kept, sums = _array(a[12], 2, n, F32), _array(a[15], (n + BLOCK - 1) // BLOCK, 3, F64)
        total = carray(pointer(a[16]), (3,), F32)
        if g2 != 0:
            _backward_by_blocks(counter, g, g2, h, f, kept, None, dh, df, sums, None, total)
        else:
            _backward_by_blocks(counter, g, None, h, f, kept, None, dh, df, sums, None, total)

    return run_backward


def _backward_with_angle(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward_with_angle(counter):
        _ = sources
        a = carray(counter, (ARRAYS + 10,))
        n, g, h, f, dh, df = a[2], a[8], a[9], a[10], a[13], a[14]
        kept, angle, turns = _array(a[11], 2, n, F32), _array(a[12], 3, n, F64), carray(pointer(a[16]), (n,), F64)
        sums, total = _array(a[15], (n + BLOCK - 1) // BLOCK, 3, F64), carray(pointer(a[17]), (3,), F32)
        _backward_by_blocks(counter, g, None, h, f, kept, angle, dh, df, sums, turns, total)

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
