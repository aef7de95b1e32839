"""C functions over the loops: ``void entry(int64_t *arguments)``, which any number of threads call at once with the
same arguments.

``arguments``: the next block of rows to be taken, n, d, the address of (step, p, radius) as doubles, then the addresses
of the arrays in the order in which an entry unpacks them, 0 for one that is absent. A thread takes blocks until none
is left.
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

from spheret.kernels import loop_angles, loops
from spheret.kernels.loop_angles import COMMON
from spheret.kernels.loops import BLOCK, backward, combine, forward, measure

SIGNATURE = types.void(types.CPointer(types.int64))
CACHED = {**COMMON, "cache": True}
F32, F64 = np.float32, np.float64


@intrinsic
def _pointer(typing_context, address):
    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), build


@intrinsic
def _take(typing_context, counter):
    """The value of ``*counter``, which is raised by one: no two threads get the same."""

    def build(context, builder, signature, arguments):
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", arguments[0], one, "monotonic")

    return types.int64(counter), build


@numba.njit(inline="always", **COMMON)
def _array(address, rows, columns, dtype):
    return carray(_pointer(address), (rows, columns), dtype)


@numba.njit(inline="always", **COMMON)
def _scalars(a):
    values = carray(_pointer(a[3]), (3,), F64)
    return values[0], values[1], values[2]


def _forward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_forward(counter):
        _ = sources  # in the key of the cache
        a = carray(counter, (8,))
        n, d = a[1], a[2]
        step, p, radius = _scalars(a)
        h, f, out = _array(a[4], n, d, F32), _array(a[5], n, d, F32), _array(a[6], n, d, F32)
        stats = _array(a[7], 6, n, F64)
        first = _take(counter) * BLOCK
        while first < n:
            forward(h, f, step, p, radius, out, stats, first, min(n, first + BLOCK))
            first = _take(counter) * BLOCK

    return run_forward


def _measure(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_measure(counter):
        _ = sources  # in the key of the cache
        a = carray(counter, (7,))
        n, d = a[1], a[2]
        h, f, stats = _array(a[4], n, d, F32), _array(a[5], n, d, F32), _array(a[6], 6, n, F64)
        first = _take(counter) * BLOCK
        while first < n:
            measure(h, f, stats, first, min(n, first + BLOCK))
            first = _take(counter) * BLOCK

    return run_measure


def _combine(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_combine(counter):
        _ = sources  # in the key of the cache
        a = carray(counter, (8,))
        n, d = a[1], a[2]
        step, _, radius = _scalars(a)
        h, f, out = _array(a[4], n, d, F32), _array(a[5], n, d, F32), _array(a[6], n, d, F32)
        stats = _array(a[7], 6, n, F64)
        first = _take(counter) * BLOCK
        while first < n:
            combine(h, f, step, radius, out, stats, first, min(n, first + BLOCK))
            first = _take(counter) * BLOCK

    return run_combine


def _backward(sources):
    @cfunc(SIGNATURE, **CACHED)
    def run_backward(counter):
        _ = sources  # in the key of the cache
        a = carray(counter, (13,))
        n, d = a[1], a[2]
        step, p, radius = _scalars(a)
        g, g2 = _array(a[4], n, d, F32), _array(a[5], n, d, F32)
        h, f, stats = _array(a[6], n, d, F32), _array(a[7], n, d, F32), _array(a[8], 6, n, F64)
        dh, df = _array(a[9], n, d, F32), _array(a[10], n, d, F32)
        sums = _array(a[11], (n + BLOCK - 1) // BLOCK, 3, F64)
        turns = carray(_pointer(a[12]), (n,), F64)
        first = _take(counter) * BLOCK
        while first < n:
            last = min(n, first + BLOCK)
            if a[5] != 0:
                backward(g, g2, h, f, stats, step, p, radius, dh, df, sums, turns, first, last)
            else:
                backward(g, None, h, f, stats, step, p, radius, dh, df, sums, turns, first, last)
            first = _take(counter) * BLOCK

    return run_backward


_BUILDERS = {"forward": _forward, "measure": _measure, "combine": _combine, "backward": _backward}


@functools.cache
def entry(name):
    """The compiled function; its code lives as long as the cache holds it."""
    return _BUILDERS[name](_sources())


@functools.cache
def _sources():
    """Digest of the loops' text. Numba keeps compiled code on disk by the file of the function alone and would not see
    that a function which it calls has changed; a closure variable is part of its key."""
    texts = (Path(module.__file__).read_bytes() for module in (loop_angles, loops))
    return hashlib.sha256(b"".join(texts)).hexdigest()
