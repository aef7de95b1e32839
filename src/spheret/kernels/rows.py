"""The retraction of float32 rows on the CPU: two operators that take tensors alone, and the autograd node over them.

This is the case that a training on CPUs lives in, and the operators are made for it: their kernels are C functions
(:mod:`spheret.kernels.boxed`) wherever PyTorch has a stable C interface, and those of :mod:`spheret.kernels.cpu`, in
Python, elsewhere. The step is ``alpha decay``; a radius of NaN keeps the norm of h.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spheret.kernels import cpu
from spheret.kernels.autograd import gradients_by_formula, sum_to

_SCALARS = "Tensor alpha, Tensor decay, Tensor p, Tensor radius"
torch.library.define(
    "spheret::rotate_rows",
    f"(Tensor h, Tensor f, {_SCALARS}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "spheret::rotate_rows_backward",
    f"(Tensor g, Tensor g2, Tensor h, Tensor f, Tensor kept, {_SCALARS}, bool learns_p)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
rotate_rows = torch.ops.spheret.rotate_rows.default
rotate_rows_backward = torch.ops.spheret.rotate_rows_backward.default


@torch.library.register_fake("spheret::rotate_rows")
def _(h: Tensor, f: Tensor, *scalars: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape, dtype=torch.float32), cpu.kept_like(h, f)


@torch.library.register_fake("spheret::rotate_rows_backward")
def _(g: Tensor, g2: Tensor, h: Tensor, *_: Any) -> tuple[Tensor, ...]:
    shapes: tuple[Any, ...] = h.shape, h.shape, (1,), (1,), (1,)
    return tuple(h.new_empty(shape, dtype=torch.float32) for shape in shapes)


class RowRetraction(torch.autograd.Function):
    """``apply(h, f, alpha, decay, p, radius, twice)`` -> h', or h' for each of its two readers; the scalars are tensors
    (1,), and ``decay`` has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, f: Tensor, alpha: Tensor, decay: Tensor, p: Tensor, radius: Tensor, twice: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, kept = rotate_rows(h, f, alpha, decay, p, radius)
        if kept is None:
            raise MemoryError(f"no memory for the retraction of {tuple(h.shape)} float32 numbers")
        ctx.save_for_backward(h, f, kept, alpha, decay, p, radius)
        ctx.set_materialize_grads(False)
        return (out, out.view_as(out)) if twice else out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, f, kept, alpha, decay, p, radius = ctx.saved_tensors
        if g is None:
            g, g2 = g2, None
        if g is None:
            return (None,) * 7
        _, _, _, _, learns_p, learns_radius, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Somebody differentiates again: the loops have no second derivative, the formulas have.
            total = g if g2 is None else g + g2
            r = radius if learns_radius or not radius.isnan() else None
            grads = gradients_by_formula(total, h, f, alpha * decay, p, r, need_p=learns_p)
            dh, df, da = grads.h, grads.f, sum_to(grads.step * decay, alpha)
            dp, dr = sum_to(grads.p, p), sum_to(grads.radius, radius)
        else:
            second = nothing(g) if g2 is None else g2
            dh, df, da, dp, dr = rotate_rows_backward(g, second, h, f, kept, alpha, decay, p, radius, learns_p)
            if df is None:
                raise MemoryError(f"no memory for the gradients of {tuple(h.shape)} float32 numbers")
        return dh, df, da, None, dp if learns_p else None, dr if learns_radius else None, None


# What `Function.apply` does besides is for function transforms.
apply_untransformed = super(torch.autograd.Function, RowRetraction).apply


@functools.lru_cache(maxsize=256)
def constant(value: float) -> Tensor:
    """A float64 tensor (1,) with this value, one for all who ask, for eager code."""
    with torch.inference_mode(False), _disable_current_modes():
        return traced_constant(value)


def traced_constant(value: float) -> Tensor:
    """The same for code that is compiled: a new one in every graph."""
    return torch.full((1,), value, dtype=torch.float64)


_NOTHING = torch.empty(0)


def nothing(like: Tensor) -> Tensor:
    """A tensor without numbers."""
    return like.new_empty(0) if torch.compiler.is_compiling() else _NOTHING


def _rotate_rows(
    h: Tensor, f: Tensor, alpha: Tensor, decay: Tensor, p: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor]:
    kernels.use_c()
    out, _, kept = cpu.forward(h.float(), f, alpha * decay, p, radius)
    return out, kept


def _rotate_rows_backward(
    g: Tensor,
    g2: Tensor,
    h: Tensor,
    f: Tensor,
    kept: Tensor,
    alpha: Tensor,
    decay: Tensor,
    p: Tensor,
    radius: Tensor,
    learns_p: bool,
) -> tuple[Tensor, ...]:
    exponent = p if learns_p else p.item()
    second = g2 if g2.numel() else None
    dh, df, sums = cpu.backward(g, second, h.float(), f.float(), kept, alpha * decay, exponent, radius)
    da, dp, dr = sums.split(1)
    return dh, df, da * decay.float(), dp.clone(), dr.clone()


class _Kernels:
    """Which kernels serve the operators: those in Python until the first call, those in C from then on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_c: Any = None
        self.in_python: Any = None
        self.why_not = ""  # those in C
        self.use_python("")

    def use_python(self, why: str) -> None:
        """Take the kernels in Python, for good if there is a reason."""
        if self.in_c is not None:
            self.in_c.withdraw()
        if self.in_python is None:
            self.in_python = torch.library.Library("spheret", "IMPL")
            self.in_python.impl("rotate_rows", _rotate_rows, "CPU")
            self.in_python.impl("rotate_rows_backward", _rotate_rows_backward, "CPU")
        self.in_c, self.why_not = None, why

    def use_c(self) -> None:
        """Take the kernels in C, unless there is a reason against them."""
        with self.lock:
            if self.in_c is not None or self.why_not:
                return
            try:
                boxed = importlib.import_module("spheret.kernels.boxed")
                boxed.compiled()
            except Exception as error:  # an older PyTorch or Numba must not stop a training
                self.why_not = f"{type(error).__name__}: {error}"
                return
            self.in_python._destroy()
            self.in_c, self.in_python = boxed.install(), None

    def after_fork(self) -> None:
        """The C kernels would wait for threads that a child does not have; those in Python know what to do."""
        self.lock = threading.Lock()
        if self.in_c is not None:
            self.use_python("in the child of a fork PyTorch's threads are missing")


kernels = _Kernels()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=kernels.after_fork)
