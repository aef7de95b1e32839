"""The Triton kernels behind the operators of :mod:`spheret.kernels.operator`: the same arguments, other statistics.

Triton is imported when a kernel first runs; whether it is installed is asked of :func:`unavailable`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spheret.geometry import compute_dtype

_STATS = 8
_served: set[str] = set()  # device types


def unavailable() -> str:
    """Why the kernels cannot run here, or the empty string."""
    if importlib.util.find_spec("triton") is None:
        return 'Triton is not installed (pip install "spheret[kernels]")'
    return ""


@functools.cache
def _launch() -> ModuleType:
    return importlib.import_module("spheret.kernels.triton_launch")


def forward(
    h: Tensor,
    f: Tensor,
    step: Tensor | None,
    step_value: float,
    p: Tensor | None,
    p_value: float,
    radius: Tensor | None,
    radius_value: float,
) -> tuple[Tensor, Tensor]:
    """``h``, ``f`` (..., d) -> the retraction in the dtype of ``h`` and row statistics (rows, 8)."""
    scalars = _scalars(step, step_value, p, p_value, radius, radius_value)
    out, _, stats = _launch().forward(h, f, *scalars)
    return out, stats


def backward(
    g: Tensor,
    h: Tensor,
    f: Tensor,
    stats: Tensor,
    step: Tensor | None,
    step_value: float,
    p: Tensor | None,
    p_value: float,
    radius: Tensor | None,
    radius_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h and f in their dtypes, and those of step, p and radius summed over rows, (3,) float64; 0 for those
    that are floats where none is a tensor."""
    learned = any(value is not None for value in (step, p, radius))
    scalars = _scalars(step, step_value, p, p_value, radius, radius_value)
    dh, df, sums = _launch().backward(g, None, h, f, stats, *scalars, need_p=p is not None, need_sums=learned)
    return dh, df, h.new_zeros(3, dtype=torch.float64) if sums is None else sums.sum(1, dtype=torch.float64)


def _scalars(
    step: Tensor | None, step_value: float, p: Tensor | None, p_value: float, radius: Tensor | None, radius_value: float
) -> tuple[Tensor | float, Tensor | float, Tensor | float | None]:
    kept = None if math.isnan(radius_value) else radius_value
    return step_value if step is None else step, p_value if p is None else p, kept if radius is None else radius


def fake_forward(h: Tensor, f: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """What :func:`forward` returns, or the CPU loops on a device that it does not serve, without the numbers."""
    rows = h.numel() // h.shape[-1]
    if h.device.type in _served:
        return h.new_empty(h.shape), h.new_empty((rows, _STATS), dtype=compute_dtype(h, f))
    return h.new_empty(h.shape), h.new_empty((rows, 3), dtype=torch.float64)


def fake_backward(g: Tensor, h: Tensor, f: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`backward` returns, without the numbers."""
    return h.new_empty(h.shape), f.new_empty(f.shape), h.new_empty((3,), dtype=torch.float64)


def register(device: str = "cuda") -> None:
    """Let the operators run on tensors of this device type; once is enough."""
    operator = importlib.import_module("spheret.kernels.operator")
    if device in _served:
        return
    _served.add(device)
    operator.retract_rows.register_kernel(device)(forward)
    operator.retract_rows_backward.register_kernel(device)(backward)
    operator.retract_rows.register_fake(fake_forward)
    operator.retract_rows_backward.register_fake(fake_backward)
