"""C functions over the loops: ``void entry(int64_t *arguments)``, which any number of threads call at once with the
same arguments.

``arguments``: the next block of rows to be taken, the blocks that are done, n, d, the address of (step, p, radius,
whether p has a gradient) as doubles, then the addresses of the arrays in the order in which an entry unpacks them, 0
for one that is absent. A thread takes blocks until none is left.
"""

# mypy: ignore-errors
from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numba
import numpy as np
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from spheret.kernels import loop_angles, loop_backward, loop_forward
from spheret.kernels.loop_angles import COMMON
from spheret.kernels.loop_backward import BLOCK, backward
from spheret.kernels.loop_forward import combine, forward, measure

SIGNATURE = types.void(types.CPointer(types.int64))
CACHED = {**COMMON, "cache": True}
F32, F64 = np.float32, np.float64


@intrinsic
def _pointer(typing_context, address):
    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), build


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
    return carray(_pointer(address), (rows, columns), dtype)


@numba.njit(inline="always", **COMMON)
def _scalars(a):
    values = carray(_pointer(a[4]), (4,), F64)
    return values[0], values[1], values[2], values[3] != 0


def _forward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_forward(counter):
        _ = sources  # in the key of the cache
        a = carray(counter, (9,))
        n, d = a[2], a[3]
        h, f, out, kept = (
            _array(a[5], n, d, F32),
            _array(a[6], n, d, F32),
            _array(a[7], n, d, F32),
            _array(a[8], 2, n, F32),
        )
        step, p, radius, _ = _scalars(a)
        first = _take(counter)
        while first < n:
            forward(h, f, step, p, radius, out, kept, first, min(n, first + BLOCK))
            first = _take(counter)

    return run_forward


def _measure(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_measure(counter):
        _ = sources
        a = carray(counter, (8,))
        n, d = a[2], a[3]
        h, f, rows = _array(a[5], n, d, F32), _array(a[6], n, d, F32), _array(a[7], 6, n, F64)
        first = _take(counter)
        while first < n:
            last = min(n, first + BLOCK)
            measure(h, f, rows[:, first:last], first, last)
            first = _take(counter)

    return run_measure


def _combine(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_combine(counter):
        _ = sources
        a = carray(counter, (10,))
        n, d = a[2], a[3]
        h, f, rows = _array(a[5], n, d, F32), _array(a[6], n, d, F32), _array(a[7], 6, n, F64)
        out, kept = _array(a[8], n, d, F32), _array(a[9], 2, n, F32)
        step, _, radius, _ = _scalars(a)
        first = _take(counter)
        while first < n:
            last = min(n, first + BLOCK)
            combine(h, f, step, radius, rows[:, first:last], out, kept, first, last)
            first = _take(counter)

    return run_combine


def _backward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward(counter):
        _ = sources
        a = carray(counter, (14,))
        n, d = a[2], a[3]
        g, g2, h, f = _array(a[5], n, d, F32), _array(a[6], n, d, F32), _array(a[7], n, d, F32), _array(a[8], n, d, F32)
        kept, dh, df = _array(a[9], 2, n, F32), _array(a[10], n, d, F32), _array(a[11], n, d, F32)
        sums = _array(a[12], (n + BLOCK - 1) // BLOCK, 3, F64)
        total = carray(_pointer(a[13]), (3,), F32)
        step, p, radius, learns_p = _scalars(a)
        done, first = 0, _take(counter)
        while first < n:
            last = min(n, first + BLOCK)
            if a[6] != 0:
                backward(g, g2, h, f, kept, None, step, p, radius, learns_p, dh, df, sums, None, first, last)
            else:
                backward(g, None, h, f, kept, None, step, p, radius, learns_p, dh, df, sums, None, first, last)
            done, first = done + 1, _take(counter)
        _add_up(counter, done, sums, total)

    return run_backward


def _backward_with_angle(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward_with_angle(counter):
        _ = sources
        a = carray(counter, (15,))
        n, d = a[2], a[3]
        g, h, f = _array(a[5], n, d, F32), _array(a[6], n, d, F32), _array(a[7], n, d, F32)
        kept = _array(a[8], 2, n, F32)
        angle, dh, df = _array(a[9], 3, n, F64), _array(a[10], n, d, F32), _array(a[11], n, d, F32)
        sums, turns = _array(a[12], (n + BLOCK - 1) // BLOCK, 3, F64), carray(_pointer(a[13]), (n,), F64)
        total = carray(_pointer(a[14]), (3,), F32)
        step, p, radius, _ = _scalars(a)
        done, first = 0, _take(counter)
        while first < n:
            last = min(n, first + BLOCK)
            backward(g, None, h, f, kept, angle, step, p, radius, False, dh, df, sums, turns, first, last)
            done, first = done + 1, _take(counter)
        _add_up(counter, done, sums, total)

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
    texts = (Path(module.__file__).read_bytes() for module in (loop_angles, loop_forward, loop_backward))
    return hashlib.sha256(b"".join(texts)).hexdigest()
