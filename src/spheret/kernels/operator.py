"""The compiled loops and kernels as operators of ``torch.library``: ``torch.compile`` (which does not open them),
export and selective checkpointing see one node each way.

A scalar comes as a one-element tensor where it has a gradient and as a float where it has none; a radius of 0 keeps the
norm of h. Dtypes may differ; statistics are float32 or better, and results have the dtype of the tensor that they
belong to, under autocast too.
"""

from __future__ import annotations

import math
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spheret.geometry import compute_dtype
from spheret.kernels import cpu, gpu
from spheret.kernels.cpu import AS_INFINITE, Scalar

BACKENDS = ("auto", "numba", "triton", "autograd")
FORCED = os.environ.get("SPHERET_BACKEND", "auto")


def kernels(h: Tensor) -> ModuleType:
    """The module whose loops or kernels serve rows like these."""
    return gpu if h.device.type == "cuda" or FORCED == "triton" else cpu


_SCALARS = "Tensor? step, float step_value, Tensor? p, float p_value, Tensor? radius, float radius_value"


def define(name: str, schema: str) -> Any:
    """A new operator ``spheret::name``.

    Defined by its schema: `torch.library.custom_op` looks for aliases at every call, which costs a small model dearly.
    """
    torch.library.define(f"spheret::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    return getattr(torch.ops.spheret, name).default


retract_rows = define(
    "retract", f"(Tensor h, Tensor f, {_SCALARS}, ScalarType? read_dtype) -> (Tensor, Tensor, Tensor)"
)
retract_rows_backward = define(
    "retract_backward",
    f"(Tensor g, Tensor? g2, Tensor h, Tensor f, Tensor kept, {_SCALARS}) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("spheret::retract", ("cpu", "cuda"))
def _retract_rows(
    h: Tensor,
    f: Tensor,
    step: Tensor | None,
    step_value: float,
    p: Tensor | None,
    p_value: float,
    radius: Tensor | None,
    radius_value: float,
    read_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``h``, ``f`` (..., d) -> the retraction (..., d) in the dtype of ``h``; the same in ``read_dtype``, or an empty
    tensor; and what the backward wants back of each row."""
    scalars = _scalar(step, step_value), _scalar(p, p_value), _scalar(radius, radius_value or None)
    out, read, kept = kernels(h).forward(h, f, *scalars, read_dtype)
    return out, h.new_empty(0) if read is None else read, kept


@torch.library.impl("spheret::retract_backward", ("cpu", "cuda"))
def _retract_rows_backward(
    g: Tensor,
    g2: Tensor | None,
    h: Tensor,
    f: Tensor,
    kept: Tensor,
    step: Tensor | None,
    step_value: float,
    p: Tensor | None,
    p_value: float,
    radius: Tensor | None,
    radius_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h and f for the sum of ``g`` and ``g2``, and those of step, p and radius over all rows, (3,) in the
    compute dtype."""
    scalars = _scalar(step, step_value), _scalar(p, p_value), _scalar(radius, radius_value or None)
    return kernels(h).backward(g, g2, h, f, kept, *scalars)


@torch.library.register_fake("spheret::retract")
def _(h: Tensor, f: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    read = h.new_empty(0) if rest[-1] is None else h.new_empty(h.shape, dtype=rest[-1])
    return h.new_empty(h.shape), read, kernels(h).kept_like(h, f)


@torch.library.register_fake("spheret::retract_backward")
def _(g: Tensor, g2: Tensor | None, h: Tensor, f: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), f.new_empty(f.shape), h.new_empty((3,), dtype=compute_dtype(h, f))


def _scalar(tensor: Tensor | None, value: float | None) -> Scalar:
    if tensor is not None:
        return tensor
    return value if value is None or value < AS_INFINITE else math.inf


def split(value: Scalar, default: float) -> tuple[Tensor | None, float]:
    """A scalar as the operators take it: tensor and float, one of them idle."""
    if isinstance(value, Tensor):
        return value, default
    # Packages of compiled models cannot write an infinity down.
    return None, default if value is None else min(float(value), AS_INFINITE)


def split_all(step: Scalar, p: Scalar, radius: Scalar) -> tuple[Any, ...]:
    """Step, p and radius as the operators take them."""
    return (*split(step, 1.0), *split(p, 1.0), *split(radius, 0.0))
