"""The retraction of float32 rows on the CPU: two operators that take tensors alone, and the autograd node over them.

This is the case that a training on CPUs lives in, and the operators are made for it: their kernels are C functions
(:mod:`spheret.kernels.boxed`) wherever PyTorch has a stable C interface, and those of :mod:`spheret.kernels.cpu`, in
Python, elsewhere.

The step is ``alpha decay``. The exponent is ``p_value``, or, where that is 0, the number in the tensor ``p``, or, with
``log_p``, that of which it is the logarithm. The norm is that of h, or, with ``reproject``, the number in ``radius``. A
scalar that is not asked for may be any. (No NaN and no infinity: packages of compiled models cannot write them down.)
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spheret.geometry import LogExponent
from spheret.kernels import cpu
from spheret.kernels.autograd import gradients_by_formula, sum_to
from spheret.kernels.cpu import AS_INFINITE
from spheret.kernels.operator import define

_SCALARS = "Tensor alpha, Tensor decay, Tensor p, float p_value, bool log_p, Tensor radius, bool reproject"
rotate_rows = define("rotate_rows", f"(Tensor h, Tensor f, {_SCALARS}) -> (Tensor, Tensor)")
rotate_rows_backward = define(
    "rotate_rows_backward",
    f"(Tensor g, Tensor g2, Tensor h, Tensor f, Tensor kept, {_SCALARS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("spheret::rotate_rows")
def _(h: Tensor, f: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape, dtype=torch.float32), cpu.kept_like(h, f)


@torch.library.register_fake("spheret::rotate_rows_backward")
def _(g: Tensor, g2: Tensor, h: Tensor, *_: Any) -> tuple[Tensor, ...]:
    shapes: tuple[Any, ...] = h.shape, h.shape, (1,), (1,), (1,)
    return tuple(h.new_empty(shape, dtype=torch.float32) for shape in shapes)


class RowRetraction(torch.autograd.Function):
    """``apply(h, f, alpha, decay, p, p_value, log_p, radius, twice)`` -> h', or h' for each of its two readers. The
    scalars are float32 tensors (1,); ``decay``, ``p`` and ``radius`` may be None, and ``decay`` has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        f: Tensor,
        alpha: Tensor,
        decay: Tensor | None,
        p: Tensor | None,
        p_value: float,
        log_p: bool,
        radius: Tensor | None,
        twice: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        scalars = (
            alpha,
            _one(alpha) if decay is None else decay,
            alpha if p is None else p,
            p_value,
            log_p,
            alpha if radius is None else radius,
            radius is not None,
        )
        out, kept = rotate_rows(h, f, *scalars)
        if kept is None:
            raise MemoryError(f"no memory for the retraction of {tuple(h.shape)} float32 numbers")
        ctx.save_for_backward(h, f, kept, alpha, scalars[1], p, radius)
        ctx.exponent = p_value, log_p
        ctx.set_materialize_grads(False)
        return (out, out.view_as(out)) if twice else out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, f, kept, alpha, decay, p, radius = ctx.saved_tensors
        p_value, log_p = ctx.exponent
        if g is None:
            g, g2 = g2, None
        if g is None:
            return (None,) * 9
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            total = g if g2 is None else g + g2
            exponent = p_value if p is None else LogExponent(p) if log_p else p
            dh, df, da, dp, dr = _differentiable(total, h, f, alpha, decay, exponent, radius)
        else:
            dh, df, da, dp, dr = rotate_rows_backward(
                g,
                _nothing(g) if g2 is None else g2,
                h,
                f,
                kept,
                alpha,
                decay,
                alpha if p is None else p,
                p_value,
                log_p,
                alpha if radius is None else radius,
                radius is not None,
            )
            if df is None:
                raise MemoryError(f"no memory for the gradients of {tuple(h.shape)} float32 numbers")
        return dh, df, da, None, None if p is None else dp, None, None, None if radius is None else dr, None


def _differentiable(
    g: Tensor,
    h: Tensor,
    f: Tensor,
    alpha: Tensor,
    decay: Tensor,
    p: float | Tensor | LogExponent,
    radius: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients where somebody differentiates again: the loops have no second derivative, the formulas have."""
    exponent = p.value() if isinstance(p, LogExponent) else p
    grads = gradients_by_formula(g, h, f, alpha * decay, exponent, radius, need_p=isinstance(p, Tensor | LogExponent))
    per_row: Any = grads.p
    if isinstance(p, LogExponent):
        per_row = per_row * exponent
    return grads.h, grads.f, sum_to(grads.step * decay, alpha), sum_to(per_row, alpha), sum_to(grads.radius, radius)


def exponent_arguments(p: float | Tensor | LogExponent) -> tuple[Tensor | None, float, bool]:
    """An exponent as the node takes it."""
    if isinstance(p, float):
        return None, min(p, AS_INFINITE), False
    return (p.rho, 0.0, True) if isinstance(p, LogExponent) else (p, 0.0, False)


# What `Function.apply` does besides is for function transforms.
apply_untransformed = super(torch.autograd.Function, RowRetraction).apply


with torch.inference_mode(False), _disable_current_modes():  # whoever imports this, a training may need them
    _ONE, _NOTHING = (torch.ones(n, device="cpu", dtype=torch.float32) for n in (1, 0))


def _one(like: Tensor) -> Tensor:
    return torch.ones_like(like) if torch.compiler.is_compiling() else _ONE


def _nothing(like: Tensor) -> Tensor:
    """A tensor without numbers."""
    return like.new_empty(0) if torch.compiler.is_compiling() else _NOTHING


def _rotate_rows(h: Tensor, f: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    if not h.is_cpu:
        raise NotImplementedError(
            f"spheret::rotate_rows is for tensors on the CPU, not on {h.device}: use spheret.retract"
        )
    kernels.use_c()
    alpha, decay, *rest = scalars
    out, _, kept = cpu.forward(h.float(), f, alpha * decay, *_in_use(*rest))
    return out, kept


def _rotate_rows_backward(
    g: Tensor, g2: Tensor, h: Tensor, f: Tensor, kept: Tensor, *scalars: Any
) -> tuple[Tensor, ...]:
    alpha, decay, *rest = scalars
    p, radius = _in_use(*rest)
    second = g2 if g2.numel() else None
    dh, df, sums = cpu.backward(g, second, h.float(), f.float(), kept, alpha * decay, p, radius)
    da, dp, dr = sums.split(1)
    log_p = rest[2]
    return dh, df, da * decay.float(), dp * p.float() if log_p else dp.clone(), dr.clone()


def _in_use(p: Tensor, p_value: float, log_p: bool, radius: Tensor, reproject: bool) -> tuple[Any, Any]:
    exponent = p_value if p_value else LogExponent(p).value() if log_p else p
    return exponent, radius if reproject else None


class _Kernels:
    """Which kernels serve the operators on the CPU: those in C, put in place by the first call, or those in Python."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_c: Any = None
        self.why_not = ""
        # A kernel for CPUs goes before one for all devices: no call finds none while those in C come and go.
        self.in_python = torch.library.Library("spheret", "IMPL")
        self.in_python.impl("rotate_rows", _rotate_rows, "CompositeExplicitAutograd")
        self.in_python.impl("rotate_rows_backward", _rotate_rows_backward, "CompositeExplicitAutograd")

    def use_python(self, why: str) -> None:
        """Take those in Python, for good if there is a reason."""
        if self.in_c is not None:
            self.in_c.withdraw()
        self.in_c, self.why_not = None, why

    def use_c(self) -> None:
        """Take those in C, unless there is a reason against them."""
        with self.lock:
            if self.in_c is not None or self.why_not:
                return
            try:
                self.in_c = importlib.import_module("spheret.kernels.boxed").install()
            except Exception as error:  # an older PyTorch or Numba must not stop a training
                self.why_not = f"{type(error).__name__}: {error}"

    def in_use(self) -> str:
        """Which those are, and why if it could be otherwise."""
        self.use_c()
        return "kernels in C" if self.in_c is not None else f"kernels in Python ({self.why_not})"

    def after_fork(self) -> None:
        """The C kernels would wait for threads that a child does not have; those in Python know what to do."""
        self.lock = threading.Lock()
        self.use_python("in the child of a fork PyTorch's threads are missing")


kernels = _Kernels()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=kernels.after_fork)
