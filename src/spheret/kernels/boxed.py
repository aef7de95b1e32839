"""The loops as C kernels of the operators in :mod:`spheret.kernels.rows`: arguments off PyTorch's stack, memory for the
results, the loop on PyTorch's threads, results onto the stack."""

# mypy: ignore-errors
from __future__ import annotations

import functools
import hashlib
import math
from pathlib import Path

import numba
import numpy as np
from numba import carray, cfunc

from spheret.geometry import LOG_P_RANGE
from spheret.kernels import entries, stable_abi
from spheret.kernels.cpu import PARALLEL_FROM
from spheret.kernels.entries import ARRAYS, BLOCK, CACHED, F32, F64, THREADS
from spheret.kernels.lanes import pointer
from spheret.kernels.loop_angles import COMMON
from spheret.kernels.stable_abi import (
    BOXED,
    data_ptr,
    declare,
    empty,
    frame,
    free,
    is_scalar,
    number,
    parallel,
    plain,
    returned,
    shape,
    threads,
)

FORWARD, BACKWARD = "spheret_rows_forward", "spheret_rows_backward"
_run_forward, _run_backward = parallel(FORWARD), parallel(BACKWARD)


@numba.njit(**COMMON)
def _words(address, count):
    return carray(pointer(address), (count,), np.int64)


@numba.njit(**COMMON)
def _exponent(tensor, value, log_p, room):
    if value != 0:
        return value
    p = number(tensor, room)
    if not log_p or math.isnan(p):
        return p
    return math.exp(min(max(p, LOG_P_RANGE[0]), LOG_P_RANGE[1]))


@numba.njit(**COMMON)
def _arguments(address, n, d, scalars, room):
    """What an entry wants before the addresses, of the operators' scalars; returns the number of threads."""
    a = _words(address, ARRAYS)
    a[0], a[1], a[2], a[3] = 0, 0, n, d
    values, p_value = a[4:THREADS].view(F64), scalars[3:4].view(F64)[0]
    values[0] = number(scalars[0], room) * number(scalars[1], room)
    values[1] = _exponent(scalars[2], p_value, scalars[4] & 1, room)
    values[2] = number(scalars[5], room) if scalars[6] & 1 else math.nan
    values[3] = p_value == 0
    a[THREADS] = threads(room) if n * d >= PARALLEL_FROM else 1
    return a[THREADS]


@numba.njit(**COMMON)
def _size(tensor, room):
    """Numbers in a tensor; -1 for a handle of 0."""
    if tensor == 0:
        return -1
    _, _, d, n = shape(tensor, room)
    return d * n


@numba.njit(**COMMON)
def _fit(h, other, room):
    """Whether a tensor has as many numbers as the rows of h, which has at least one dimension."""
    return h != 0 and shape(h, room)[0] > 0 and _size(other, room) == _size(h, room)


@numba.njit(**COMMON)
def _are_scalars(s, room):
    return is_scalar(s[0], room) and is_scalar(s[1], room) and is_scalar(s[2], room) and is_scalar(s[5], room)


@numba.njit(**COMMON)
def _free_scalars(scalars):
    free(scalars[0])
    free(scalars[1])
    free(scalars[2])
    free(scalars[5])


@numba.njit(**COMMON)
def _like(tensor, room):
    count, sizes, _, _ = shape(tensor, room)
    return empty(count, sizes, room)


@numba.njit(**COMMON)
def _of_size(count, room):
    """An empty tensor (count,); ``room`` has two words here."""
    _words(room + 8, 1)[0] = count
    return empty(1, room + 8, room)


@numba.njit(**COMMON)
def _one(value, room):
    """A tensor (1,) with this number."""
    tensor = _of_size(1, room)
    if tensor != 0:
        carray(pointer(data_ptr(tensor, room)), (1,), F32)[0] = value
    return tensor


def _forward(sources):
    @cfunc(BOXED, **CACHED)
    def rotate_rows(stack, inputs, outputs):
        _ = sources  # in the key of the cache
        room, arguments, s = frame(2), frame(13), carray(stack, (9,))  # h, f, seven scalars -> out, kept
        s[0], s[1] = plain(s[0], room), plain(s[1], room)
        out, kept = 0, 0
        if _fit(s[0], s[1], room) and _are_scalars(s[2:], room):
            _, _, d, n = shape(s[0], room)
            out, kept = _like(s[0], room), _of_size(n, room)
            if out != 0 and kept != 0:
                count = _arguments(arguments, n, d, s[2:], room)
                addresses = _words(arguments + 8 * ARRAYS, 4)
                addresses[0], addresses[1] = data_ptr(s[0], room), data_ptr(s[1], room)
                addresses[2], addresses[3] = data_ptr(out, room), data_ptr(kept, room)
                _run_forward(count, arguments)
        free(s[0])
        free(s[1])
        _free_scalars(s[2:])
        s[0], s[1] = returned(out, room), returned(kept, room)

    return rotate_rows


def _backward(sources):
    @cfunc(BOXED, **CACHED)
    def rotate_rows_backward(stack, inputs, outputs):
        _ = sources
        # g, g2, h, f, kept, seven scalars -> dh, df, gradients of alpha, p and radius
        room, arguments, sums_at, s = frame(2), frame(18), frame(2), carray(stack, (12,))
        for k in range(5):
            s[k] = plain(s[k], room)
        dh, df, total = 0, 0, carray(pointer(sums_at), (3,), F32)
        total[:] = 0
        ds, dp, dr = 0, 0, 0
        fits = _fit(s[2], s[0], room) and (_fit(s[2], s[1], room) or _size(s[1], room) == 0) and _fit(s[2], s[3], room)
        if fits and _size(s[4], room) == shape(s[2], room)[3] and _are_scalars(s[5:], room):
            _, _, d, n = shape(s[2], room)
            dh, df = _like(s[2], room), _like(s[2], room)
            if dh != 0 and df != 0:
                count = _arguments(arguments, n, d, s[5:], room)
                sums, addresses = np.empty((n + BLOCK - 1) // BLOCK * 3 + 1), _words(arguments + 8 * ARRAYS, 9)
                addresses[0], addresses[1] = data_ptr(s[0], room), data_ptr(s[1], room) if _size(s[1], room) else 0
                for k in range(2, 5):
                    addresses[k] = data_ptr(s[k], room)
                addresses[5], addresses[6] = data_ptr(dh, room), data_ptr(df, room)
                addresses[7], addresses[8] = sums.ctypes.data, sums_at
                _run_backward(count, arguments)
                sums[-1] = 0  # so that the array lives as long as its address is in use
                p = _words(arguments, ARRAYS)[5:6].view(F64)[0] if s[9] & 1 else 1.0
                ds, dr = _one(total[0] * F32(number(s[6], room)), room), _one(total[2], room)
                dp = _one(total[1] * F32(p), room)
        for k in range(5):
            free(s[k])
        _free_scalars(s[5:])
        s[0], s[1], s[2] = returned(dh, room), returned(df, room), returned(ds, room)
        s[3], s[4] = returned(dp, room), returned(dr, room)

    return rotate_rows_backward


@functools.cache
def compiled():
    """The kernels' addresses by the names of their operators; their code lives as long as the cache holds it.

    Raises:
        AttributeError: this PyTorch lacks a part of the interface.
    """
    declare(FORWARD, entries.entry("forward").address)
    declare(BACKWARD, entries.entry("backward").address)
    texts = (Path(module.__file__).read_bytes() for module in (entries, stable_abi))
    sources = hashlib.sha256(b"".join(texts)).hexdigest()
    return {kernel.__name__: kernel for kernel in (_forward(sources), _backward(sources))}


def install():
    """Register the kernels until the result is withdrawn."""
    return stable_abi.Implementation("spheret", {name: kernel.address for name, kernel in compiled().items()})
