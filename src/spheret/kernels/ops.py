"""The retraction as two operators of ``torch.library``, one for each direction.

``torch.compile`` does not trace into them; export and selective checkpointing see one node per direction. On the CPU
they run ``csrc/retract.cpp``, on a GPU the Triton kernels.

Scalars are tensors of one element. The step size is ``alpha lambda_l``. With ``log_p`` the exponent is ``exp(p)``.
Without ``radius`` the norm of h is kept. ``theta`` (rows,), if given, holds the angle of every row and replaces
``p arctan(beta/p)``; ``slope`` (rows,) is its derivative with respect to beta. The dtypes of h, f and gradients may
differ. Row statistics are float32 or better; a gradient has the dtype of its argument, h' the dtype of h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SCALARS = "Tensor alpha, Tensor p, Tensor? radius, float lambda_l, bool log_p, Tensor? theta"
_SCHEMAS = {
    # h' (..., d); h' in branch_dtype, or an empty tensor; the row statistics that the backward pass needs
    "retract": f"(Tensor h, Tensor f, {_SCALARS}, ScalarType? branch_dtype) -> (Tensor, Tensor, Tensor)",
    # gradients of h, f, alpha, p (0 unless need_p), radius (empty without one) and theta (empty without one); the
    # incoming gradient is the sum of g and g_branch
    "retract_backward": f"(Tensor g, Tensor? g_branch, Tensor h, Tensor f, Tensor kept, {_SCALARS}, Tensor? slope, "
    "bool need_p) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # beta = |w|/|h| (rows,), float64
    "update_size": "(Tensor h, Tensor f, Tensor alpha) -> Tensor",
}
# Schemas, because `torch.library.custom_op` checks for aliases at every call, which slows a small model noticeably.
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"spheret::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


class Kernels(NamedTuple):
    """The functions of one backend, each with the signature of its operator."""

    retract: Callable[..., tuple[Tensor, Tensor, Tensor]]
    retract_backward: Callable[..., tuple[Tensor, ...]]
    update_size: Callable[..., Tensor]


OPERATORS = Kernels(*(getattr(torch.ops.spheret, name).default for name in _SCHEMAS))


def kernels(backend: str, h: Tensor) -> Kernels:
    """The operators. In Triton's interpreter, whose tensors are on the CPU: the Triton functions themselves."""
    if backend == "triton" and not h.is_cuda:
        return Kernels(*(getattr(_triton_launch(), name) for name in _SCHEMAS))
    return OPERATORS


def _triton_launch() -> Any:
    from spheret.kernels import triton_launch  # here, because this imports Triton

    return triton_launch


for _name in _SCHEMAS:
    torch.library.impl(f"spheret::{_name}", "cuda", lambda *args, _name=_name: getattr(_triton_launch(), _name)(*args))


def _rows(h: Tensor) -> Any:
    return h.numel() // h.shape[-1]


@torch.library.register_fake("spheret::retract")
def _(h: Tensor, f: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    branch_dtype = rest[-1]
    branch = h.new_empty(0) if branch_dtype is None else h.new_empty(h.shape, dtype=branch_dtype)
    if h.device.type == "cuda":
        kept = h.new_empty((_rows(h), 8), dtype=torch.float32)
    else:
        kept = h.new_empty(_rows(h), dtype=torch.float32)
    return h.new_empty(h.shape), branch, kept


@torch.library.register_fake("spheret::retract_backward")
def _(g: Tensor, g_branch: Tensor | None, h: Tensor, f: Tensor, kept: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    alpha, p, radius, _, _, theta, _, _ = rest
    return (
        h.new_empty(h.shape),
        f.new_empty(f.shape),
        torch.empty_like(alpha),
        torch.empty_like(p),
        alpha.new_empty(0) if radius is None else torch.empty_like(radius),
        h.new_empty(0 if theta is None else _rows(h), dtype=torch.float64),
    )


@torch.library.register_fake("spheret::update_size")
def _(h: Tensor, f: Tensor, alpha: Tensor) -> Tensor:
    return h.new_empty(_rows(h), dtype=torch.float64)
