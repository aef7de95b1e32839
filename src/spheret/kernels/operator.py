"""The CPU loops as operators of ``torch.library``: eager code, ``torch.compile`` (which does not open them), export
and autograd see one node each way. Numba is imported when an operator first runs.

A scalar comes as a one-element tensor where it has a gradient and as a float where it has none; a radius of NaN keeps
the norm of h.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spheret.geometry import retract_vjp

PARALLEL_FROM = 1 << 14  # elements: below, waking a second thread costs more than it saves


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
        _loops()
    except Exception as error:  # a Numba that does not fit this NumPy or Python must not stop a training
        return f"Numba does not import: {error}"
    return ""


@functools.cache
def _loops() -> ModuleType:
    return importlib.import_module("spheret.kernels.loops")


_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a forked child has the object but not its threads


def _call(name: str, rows: tuple[Any, ...], scalars: tuple[float, ...], results: tuple[Any, ...]) -> None:
    """Run a loop over rows, cut into one piece per thread that PyTorch may use.

    Plain threads, which sleep while they wait. An OpenMP pool beside PyTorch's own would spin against it on a busy
    machine, and would not survive a fork.
    """
    loop, n = getattr(_loops(), name), rows[0].shape[0]
    threads = min(torch.get_num_threads(), n) if rows[0].size >= PARALLEL_FROM else 1

    def work(piece: int) -> None:
        part = slice(piece * n // threads, (piece + 1) * n // threads)
        loop(*(r[part] for r in rows), *scalars, *(r[part] for r in results))

    if threads == 1:
        return work(0)
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="spheret")
    others = [_pools[threads].submit(work, piece) for piece in range(1, threads)]
    work(0)
    for other in others:
        other.result()


def _rows(t: Tensor) -> Any:
    return t.detach().reshape(-1, t.shape[-1]).contiguous().numpy()


def _value(tensor: Tensor | None, value: float) -> float:
    return value if tensor is None else tensor.item()


@torch.library.custom_op("spheret::retract_rows", mutates_args=(), device_types="cpu")
def retract_rows(
    h: Tensor,
    f: Tensor,
    step: Tensor | None,
    step_value: float,
    p: Tensor | None,
    p_value: float,
    radius: Tensor | None,
    radius_value: float,
) -> tuple[Tensor, Tensor]:
    """float32 ``h``, ``f`` (..., d) -> the retraction (..., d) and row statistics (rows, 3) in float64."""
    out = torch.empty(h.shape, dtype=h.dtype)
    stats = torch.empty((h.numel() // h.shape[-1], 3), dtype=torch.float64)
    scalars = _value(step, step_value), _value(p, p_value), _value(radius, radius_value)
    _call("forward", (_rows(h), _rows(f)), scalars, (out.view(-1, h.shape[-1]).numpy(), stats.numpy()))
    return out, stats


@torch.library.custom_op("spheret::retract_rows_backward", mutates_args=(), device_types="cpu")
def retract_rows_backward(
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
    """Gradients of h and f, and those of step, p and radius summed over rows, (3,) float64."""
    dh, df = (torch.empty(h.shape, dtype=h.dtype) for _ in range(2))
    sums = torch.empty_like(stats)
    scalars = _value(step, step_value), _value(p, p_value), _value(radius, radius_value)
    outputs = tuple(t.view(-1, h.shape[-1]).numpy() for t in (dh, df))
    _call("backward", (_rows(g), _rows(h), _rows(f)), scalars, (stats.numpy(), *outputs, sums.numpy()))
    return dh, df, sums.sum(0)


@retract_rows.register_fake
def _(h: Tensor, f: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = h.numel() // h.shape[-1]
    return h.new_empty(h.shape), h.new_empty((rows, 3), dtype=torch.float64)


@retract_rows_backward.register_fake
def _(g: Tensor, h: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape), h.new_empty((3,), dtype=torch.float64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, f, step, step_value, p, p_value, radius, radius_value = inputs
    ctx.save_for_backward(h, f, output[1], step, p, radius)
    ctx.values = step_value, p_value, radius_value
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, g: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    h, f, stats, step, p, radius = ctx.saved_tensors
    step_value, p_value, radius_value = ctx.values
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Somebody differentiates again: the operator has no second derivative, the formulas have.
        grads = retract_vjp(
            g,
            h,
            f,
            step_value if step is None else step,
            p_value if p is None else p,
            (None if math.isnan(radius_value) else radius_value) if radius is None else radius,
            need_p=p is not None,
        )
        dh, df, scalars = grads.h, grads.f, (grads.step, grads.p, grads.radius)
    else:
        dh, df, sums = retract_rows_backward(g, h, f, stats, step, step_value, p, p_value, radius, radius_value)
        scalars = (sums[0], sums[1], sums[2])

    def shaped(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if like is None or grad is None else grad.sum().to(like.dtype).reshape(like.shape)

    ds, dp, dr = (shaped(grad, like) for grad, like in zip(scalars, (step, p, radius), strict=True))
    return dh, df, ds, None, dp, None, dr, None


retract_rows.register_autograd(_backward, setup_context=_setup_context)
