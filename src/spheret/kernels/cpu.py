"""The compiled CPU loops as functions on tensors. Numba is imported when one of them first runs."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spheret.kernels import team

PARALLEL_FROM = 1 << 14  # elements: below, waking a second thread costs more than it saves
F32 = torch.float32
Scalar = Tensor | float | None

_INSTALLED = importlib.util.find_spec("numba") is not None


def unavailable(h: Tensor | None = None) -> str:
    """Why the loops cannot serve rows like these (or any), or the empty string."""
    if h is not None and h.device.type != "cpu":
        return f"tensors lie on {h.device.type}"
    if not _INSTALLED:
        return 'Numba is not installed (pip install "spheret[cpu]")'
    # A compiler that traces this takes the installed package at its word: it cannot follow an import.
    return "" if torch.compiler.is_compiling() else _import_error()


@functools.cache
def _import_error() -> str:
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
    return h.new_empty((2, _rows(h)), dtype=F32)


def forward(
    h: Tensor, f: Tensor, step: Scalar, p: Scalar, radius: Scalar, read_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The retraction (..., d) in the dtype of ``h``, the same in ``read_dtype`` unless that is None, and the radial
    coefficient of each row in two parts, (2, rows) float32, which the backward wants back."""
    out, kept = torch.empty(h.shape, dtype=F32), kept_like(h, f)
    _call("forward", h.shape, (step, p, radius), (_plain(h), _plain(f), out, kept))
    return _cast(out, h.dtype), None if read_dtype is None else out.to(read_dtype), kept


def backward(
    g: Tensor, g2: Tensor | None, h: Tensor, f: Tensor, kept: Tensor, step: Scalar, p: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h`` and ``f`` in their dtypes for the sum of ``g`` and ``g2``; those of step, p and radius, (3,)
    float32, that of p if it is a tensor."""
    dh, df, total = torch.empty(h.shape, dtype=F32), torch.empty(h.shape, dtype=F32), torch.zeros(3, dtype=F32)
    incoming = (_plain(g), None if g2 is None else _plain(g2))
    sums = _sums(h)
    _call("backward", h.shape, (step, p, radius), (*incoming, _plain(h), _plain(f), kept, dh, df, sums, total))
    return _cast(dh, h.dtype), _cast(df, f.dtype), total


def measure(h: Tensor, f: Tensor, step: Scalar) -> tuple[Tensor, Tensor]:
    """Statistics (6, rows) float64 of each row, the last three without values, and beta (rows,), for an angle function
    that is evaluated elsewhere."""
    stats = torch.empty((6, _rows(h)), dtype=torch.float64)
    _call("measure", h.shape, (None, None, None), (_plain(h), _plain(f), stats))
    alive = stats[0] > 0
    return stats, abs(_value(step)) * torch.where(alive, stats[2] / torch.where(alive, stats[0], 1.0), 0.0).sqrt()


def combine(
    h: Tensor, f: Tensor, stats: Tensor, beta: Tensor, theta: Tensor, kappa: Tensor, step: Scalar, radius: Scalar
) -> Tensor:
    """The retraction by the angles theta (rows,) with slopes kappa, with which the statistics are completed in
    place."""
    stats[3], stats[5] = theta.cos(), kappa
    stats[4] = torch.where(beta > 0, theta.sin() / torch.where(beta > 0, beta, 1.0), 1.0)
    out = torch.empty(h.shape, dtype=F32)
    _call("combine", h.shape, (step, None, radius), (_plain(h), _plain(f), stats, out, kept_like(h, f)))
    return _cast(out, h.dtype)


def backward_with_angle(
    g: Tensor, h: Tensor, f: Tensor, stats: Tensor, kappa: Tensor, step: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`backward` for complete statistics; also d loss / d theta of each row."""
    dh, df, total = torch.empty(h.shape, dtype=F32), torch.empty(h.shape, dtype=F32), torch.zeros(3, dtype=F32)
    turns = torch.empty(_rows(h), dtype=torch.float64)
    first = stats[1].float()
    kept = torch.stack((first, (stats[1] - first).float()))
    tensors = (_plain(g), _plain(h), _plain(f), kept, stats[3:], dh, df, _sums(h), turns, total)
    _call("backward_with_angle", h.shape, (step, None, radius), tensors)
    return _cast(dh, h.dtype), _cast(df, f.dtype), total, turns


def _sums(h: Tensor) -> Any:
    """Room for the gradients of step, p and radius block by block."""
    return (ctypes.c_double * (3 * -(-_rows(h) // _entries().BLOCK)))()


def _rows(t: Tensor) -> int:
    return t.numel() // t.shape[-1]


def _plain(t: Tensor) -> Tensor:
    # In a small model the calls that find nothing to do would cost as much as the loop.
    if t.dtype == F32 and t.is_contiguous():
        return t
    return t.detach().to(F32).contiguous()


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if dtype == F32 else t.to(dtype)


def _value(scalar: Scalar, default: float = math.nan) -> float:
    if isinstance(scalar, Tensor):
        return scalar.item()
    return default if scalar is None else scalar


def _call(name: str, shape: torch.Size, scalars: tuple[Scalar, ...], arrays: tuple[Any, ...]) -> None:
    size, d = shape.numel(), shape[-1]
    values = (ctypes.c_double * 4)(*map(_value, scalars), isinstance(scalars[1], Tensor))
    addresses = [_address(array) for array in arrays]
    arguments = (ctypes.c_int64 * (5 + len(arrays)))(0, 0, size // d, d, ctypes.addressof(values), *addresses)
    threads = torch.get_num_threads() if size >= PARALLEL_FROM else 1
    team.run(_entries().entry(name).address, ctypes.addressof(arguments), threads)


def _address(array: Any) -> int:
    if isinstance(array, Tensor):
        return array.data_ptr()
    return 0 if array is None else ctypes.addressof(array)
