"""The Triton kernels with the interface of :mod:`spheret.kernels.cpu`. Triton is imported when one of them first runs.

In Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported) they run on CPU tensors too, slowly.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from spheret.geometry import compute_dtype
from spheret.kernels.cpu import Scalar

MAX_WIDTH = 16_384  # numbers of a row that the registers of a program hold
_STATS = 8

_INSTALLED = importlib.util.find_spec("triton") is not None


def unavailable(h: Tensor) -> str:
    """Why the kernels cannot serve rows like these, or the empty string."""
    if not _INSTALLED:
        return 'Triton is not installed (pip install "spheret[kernels]")'
    if h.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors lie on {h.device.type}, where Triton runs in its interpreter alone (TRITON_INTERPRET=1)"
    if h.shape[-1] > MAX_WIDTH:
        return f"rows of {h.shape[-1]:,} numbers do not fit into registers ({MAX_WIDTH:,} do)"
    return ""


@functools.cache
def _launch() -> ModuleType:
    return importlib.import_module("spheret.kernels.triton_launch")


def kept_like(h: Tensor, f: Tensor) -> Tensor:
    """An empty tensor like the third that :func:`forward` returns."""
    return h.new_empty((h.numel() // h.shape[-1], _STATS), dtype=compute_dtype(h, f))


def forward(
    h: Tensor, f: Tensor, step: Scalar, p: Scalar, radius: Scalar, read_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The retraction in the dtype of ``h``, the same in ``read_dtype`` unless that is None, and row statistics
    (rows, 8)."""
    return _launch().forward(h, f, step, p, radius, branch_dtype=read_dtype)


def backward(
    g: Tensor, g2: Tensor | None, h: Tensor, f: Tensor, kept: Tensor, step: Scalar, p: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h`` and ``f`` in their dtypes for the sum of ``g`` and ``g2``; those of step, p and radius, (3,)
    in the compute dtype, 0 for those that are floats where none is a tensor."""
    learned = any(isinstance(value, Tensor) for value in (step, p, radius))
    scalars, learns_p = (step, p, radius), isinstance(p, Tensor)
    dh, df, sums = _launch().backward(g, g2, h, f, kept, *scalars, need_p=learns_p, need_sums=learned)
    dtype = compute_dtype(h, f)
    return dh, df, h.new_zeros(3, dtype=dtype) if sums is None else sums.sum(1, dtype=torch.float64).to(dtype)


def measure(h: Tensor, f: Tensor, step: Scalar) -> tuple[Tensor, Tensor]:
    """Row statistics and beta (rows,), for an angle function that is evaluated elsewhere."""
    return _launch().row_dots(h, f, step)


def combine(
    h: Tensor, f: Tensor, stats: Tensor, beta: Tensor, theta: Tensor, kappa: Tensor, step: Scalar, radius: Scalar
) -> Tensor:
    """The retraction by the angles theta (rows,), with which the statistics are completed in place."""
    _launch().set_angle(stats, beta, theta)
    return _launch().combine(h, f, stats, step, radius)[0]


def backward_with_angle(
    g: Tensor, h: Tensor, f: Tensor, stats: Tensor, kappa: Tensor, step: Scalar, radius: Scalar
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`backward` for an angle with slope kappa (rows,); also d loss / d theta of each row."""
    dh, df, sums = _launch().backward(g, None, h, f, stats, step, 1.0, radius, kappa=kappa)
    return dh, df, sums.sum(1, dtype=torch.float64), sums[1]
