"""The compiled CPU loops as functions on tensors. Numba is imported when one of them first runs."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
import struct
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spheret.kernels import team

PARALLEL_FROM = 1 << 14  # elements: below, waking a second thread costs more than it saves
AS_INFINITE = 1e30  # an exponent from which on p is infinite, to the last bit
F32 = torch.float32
Scalar = Tensor | float | None

_INSTALLED = importlib.util.find_spec("numba") is not None


def unavailable(h: Tensor | None = None) -> str:
    """Why the loops cannot serve rows like these (or any), or the empty string."""
    if h is not None and h.device.type != "cpu":
        return f"tensors lie on {h.device.type}"
    # A compiler that traces this takes the installed package at its word: it cannot follow an import.
    return "" if _INSTALLED and torch.compiler.is_compiling() else import_error()


@functools.cache
def import_error() -> str:
    """Why the loops cannot be had, or the empty string."""
    if not _INSTALLED:
        return 'Numba is not installed (pip install "spheret[cpu]")'
    try:
        _entries()
    except Exception as error:  # a Numba that does not fit this NumPy or Python must not stop a training
        return f"Numba does not import: {error}"
    return ""


@functools.cache
def _entries() -> ModuleType:
    return importlib.import_module("spheret.kernels.entries")


def kept_like(h: Tensor, f: Tensor) -> Tensor:
    """An empty tensor like the third that :func:`forward` returns."""
    return torch.empty(_rows(h), dtype=F32, device=h.device)


def forward(
    h: Tensor, f: Tensor, step: Scalar, p: Scalar, radius: Scalar, read_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The retraction (..., d) in the dtype of ``h``, the same in ``read_dtype`` unless that is None, and the radial
    coefficient of each row, (rows,) float32, which the backward wants back."""
    x, y = _plain(h), _plain(f)
    out, kept = torch.empty_like(x), kept_like(x, y)
    _call("forward", x, step, p, radius, x.data_ptr(), y.data_ptr(), out.data_ptr(), kept.data_ptr())
    return _cast(out, h.dtype), None if read_dtype is None else out.to(read_dtype), kept


def backward(
    g: Tensor, g2: Tensor | None, h: Tensor, f: Tensor, kept: Tensor, step: Scalar, p: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h`` and ``f`` in their dtypes for the sum of ``g`` and ``g2``; those of step, p and radius, (3,)
    float32, that of p if it is a tensor."""
    x, y, g, kept = _plain(h), _plain(f), _plain(g), _plain(kept)
    g2 = None if g2 is None else _plain(g2)
    dh, df, total, sums = torch.empty_like(x), torch.empty_like(x), torch.zeros(3, dtype=F32), _sums(x)
    addresses = g.data_ptr(), 0 if g2 is None else g2.data_ptr(), x.data_ptr(), y.data_ptr(), kept.data_ptr()
    results = dh.data_ptr(), df.data_ptr(), ctypes.addressof(sums), total.data_ptr()
    _call("backward", x, step, p, radius, *addresses, *results)
    return _cast(dh, h.dtype), _cast(df, f.dtype), total


def measure(h: Tensor, f: Tensor, step: Scalar) -> tuple[Tensor, Tensor]:
    """Statistics (6, rows) float64 of each row, the last three without values, and beta (rows,), for an angle function
    that is evaluated elsewhere."""
    x, y = _plain(h), _plain(f)
    stats = torch.empty((6, _rows(x)), dtype=torch.float64)
    _call("measure", x, None, None, None, x.data_ptr(), y.data_ptr(), stats.data_ptr())
    alive = stats[0] > 0
    return stats, abs(_value(step)) * torch.where(alive, stats[2] / torch.where(alive, stats[0], 1.0), 0.0).sqrt()


def combine(
    h: Tensor, f: Tensor, stats: Tensor, beta: Tensor, theta: Tensor, kappa: Tensor, step: Scalar, radius: Scalar
) -> Tensor:
    """The retraction by the angles theta (rows,) with slopes kappa, with which the statistics are completed in
    place."""
    stats[3], stats[5] = theta.cos(), kappa
    stats[4] = torch.where(beta > 0, theta.sin() / torch.where(beta > 0, beta, 1.0), 1.0)
    x, y = _plain(h), _plain(f)
    out, kept = torch.empty_like(x), kept_like(x, y)
    addresses = x.data_ptr(), y.data_ptr(), stats.data_ptr(), out.data_ptr(), kept.data_ptr()
    _call("combine", x, step, None, radius, *addresses)
    return _cast(out, h.dtype)


def backward_with_angle(
    g: Tensor, h: Tensor, f: Tensor, stats: Tensor, kappa: Tensor, step: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`backward` for complete statistics; also d loss / d theta of each row."""
    x, y, g = _plain(h), _plain(f), _plain(g)
    dh, df, total, sums = torch.empty_like(x), torch.empty_like(x), torch.zeros(3, dtype=F32), _sums(x)
    turns = torch.empty(_rows(x), dtype=torch.float64)
    kept = stats[1].float()
    addresses = g.data_ptr(), x.data_ptr(), y.data_ptr(), kept.data_ptr(), stats[3:].data_ptr()
    results = dh.data_ptr(), df.data_ptr(), ctypes.addressof(sums), turns.data_ptr(), total.data_ptr()
    _call("backward_with_angle", x, step, None, radius, *addresses, *results)
    return _cast(dh, h.dtype), _cast(df, f.dtype), total, turns


def _sums(h: Tensor) -> Any:
    """Room for the gradients of step, p and radius block by block."""
    return (ctypes.c_double * (3 * -(-_rows(h) // _entries().BLOCK)))()


def _rows(t: Tensor) -> int:
    return t.numel() // t.shape[-1]


def _plain(t: Tensor) -> Tensor:
    # In a small model the calls that find nothing to do would cost as much as the loop.
    if t.dtype is F32 and t.is_contiguous():
        return t
    return t.detach().to(F32).contiguous()


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if dtype is F32 else t.to(dtype)


def _value(scalar: Scalar) -> float:
    if isinstance(scalar, Tensor):
        return scalar.item()
    return math.nan if scalar is None else scalar


def _call(name: str, h: Tensor, step: Scalar, p: Scalar, radius: Scalar, *addresses: int) -> None:
    """Run an entry over the rows of ``h``."""
    size, d = h.numel(), h.shape[-1]
    layout, room = _layout(len(addresses))
    values = _value(step), _value(p), _value(radius), isinstance(p, Tensor)
    threads = torch.get_num_threads() if size >= PARALLEL_FROM else 1
    arguments = room.from_buffer_copy(layout.pack(0, 0, size // d, d, *values, threads, *addresses))
    team.run(_address(name), ctypes.addressof(arguments), threads)


@functools.cache
def _layout(addresses: int) -> tuple[struct.Struct, Any]:
    """Of an entry's arguments, and a buffer for them."""
    layout = struct.Struct(f"4q4dq{addresses}q")
    return layout, ctypes.c_char * layout.size


@functools.cache
def _address(name: str) -> int:
    address: int = _entries().entry(name).address
    return address
