"""The compiled CPU loops as functions on tensors. Numba is imported when one of them first runs."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
from types import ModuleType

import torch
from torch import Tensor

from spheret.kernels import team

PARALLEL_FROM = 1 << 14  # elements: below, waking a second thread costs more than it saves
KEPT = 2  # float32 numbers of each row
Scalar = Tensor | float | None

_INSTALLED = importlib.util.find_spec("numba") is not None


def unavailable() -> str:
    """Why the loops cannot run here, or the empty string."""
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


def forward(h: Tensor, f: Tensor, step: Scalar, p: Scalar, radius: Scalar) -> tuple[Tensor, Tensor]:
    """The retraction (..., d) in the dtype of ``h``, and the radial coefficient of each row in two parts, (2, rows)
    float32, which the backward wants back."""
    out, kept = torch.empty(h.shape, dtype=torch.float32), torch.empty((KEPT, _rows(h)), dtype=torch.float32)
    _call("forward", h.shape, (step, p, radius), (_plain(h), _plain(f), out, kept))
    return out.to(h.dtype), kept


def backward(
    g: Tensor, g2: Tensor | None, h: Tensor, f: Tensor, kept: Tensor, step: Scalar, p: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h`` and ``f`` in their dtypes for the sum of ``g`` and ``g2``; those of step, p and radius, (3,)
    float64, that of p if it is a tensor."""
    dh, df, sums = _gradients(h)
    incoming = (_plain(g), None if g2 is None else _plain(g2))
    _call("backward", h.shape, (step, p, radius), (*incoming, _plain(h), _plain(f), kept, dh, df, sums))
    return dh.to(h.dtype), df.to(f.dtype), sums.sum(0)


def measure(h: Tensor, f: Tensor) -> Tensor:
    """Statistics of each row for an angle function that is evaluated elsewhere, (6, rows) float64: |h|^2,
    c = <h,f>/|h|^2, |f - c h|^2, and room for cos(theta), sin(theta)/beta and d theta/d beta."""
    rows = torch.empty((6, _rows(h)), dtype=torch.float64)
    _call("measure", h.shape, (None, None, None), (_plain(h), _plain(f), rows))
    return rows


def combine(h: Tensor, f: Tensor, rows: Tensor, step: Scalar, radius: Scalar) -> tuple[Tensor, Tensor]:
    """:func:`forward` for statistics of :func:`measure` with the angles filled in."""
    out, kept = torch.empty(h.shape, dtype=torch.float32), torch.empty((KEPT, _rows(h)), dtype=torch.float32)
    _call("combine", h.shape, (step, None, radius), (_plain(h), _plain(f), rows, out, kept))
    return out.to(h.dtype), kept


def backward_with_angle(
    g: Tensor, h: Tensor, f: Tensor, kept: Tensor, angle: Tensor, step: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`backward` for the last three rows of the statistics, (3, rows); also d loss / d theta of each row."""
    dh, df, sums = _gradients(h)
    turns = torch.empty(_rows(h), dtype=torch.float64)
    tensors = (_plain(g), _plain(h), _plain(f), kept, angle.contiguous(), dh, df, sums, turns)
    _call("backward_with_angle", h.shape, (step, None, radius), tensors)
    return dh.to(h.dtype), df.to(f.dtype), sums.sum(0), turns


def _gradients(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dh, df = (torch.empty(h.shape, dtype=torch.float32) for _ in range(2))
    return dh, df, torch.empty((-(-_rows(h) // _entries().BLOCK), 3), dtype=torch.float64)


def _rows(t: Tensor) -> int:
    return t.numel() // t.shape[-1]


def _plain(t: Tensor) -> Tensor:
    return t.detach().to(torch.float32).contiguous()


def _value(scalar: Scalar, default: float = math.nan) -> float:
    return default if scalar is None else float(scalar)


def _call(name: str, shape: torch.Size, scalars: tuple[Scalar, ...], tensors: tuple[Tensor | None, ...]) -> None:
    size, d = shape.numel(), shape[-1]
    values = (ctypes.c_double * 4)(*map(_value, scalars), isinstance(scalars[1], Tensor))
    addresses = (0 if t is None else t.data_ptr() for t in tensors)
    arguments = (ctypes.c_int64 * (4 + len(tensors)))(0, size // d, d, ctypes.addressof(values), *addresses)
    threads = torch.get_num_threads() if size >= PARALLEL_FROM else 1
    team.run(_entries().entry(name).address, ctypes.addressof(arguments), threads)
