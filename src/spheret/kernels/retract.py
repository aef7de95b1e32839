"""``retract``: checked arguments, then the backend that serves them. ``which_backend`` says which one, and why.

``with spheret.backend("autograd"):`` forces a backend, as does ``SPHERET_BACKEND`` in the environment when the package
is imported: ``cpp``, ``triton``, ``autograd`` or, by default, ``auto``.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from spheret.geometry import Angle, compute_dtype, exponent_from_log, retract_rows
from spheret.kernels import cpp
from spheret.kernels.autograd import Retraction, retract_with_angle

BACKENDS = ("auto", "cpp", "triton", "autograd")
LARGEST_P = 1e30  # p = inf to the last bit, and a number that a compiled model's package can write down
LARGEST_TRITON_WIDTH = 16_384  # numbers of a row that the registers of a Triton program hold

_forced = os.environ.get("SPHERET_BACKEND", "auto")
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class Backend(NamedTuple):
    """A path that serves the retraction, and why it is taken.

    ``cpp``: the C++ kernel on CPUs. ``triton``: the Triton kernels on GPUs. ``autograd``: PyTorch operations with the
    hand-written backward pass. ``reference``: PyTorch operations throughout.
    """

    name: str
    reason: str


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend for all retractions inside the ``with`` block, in every thread of the process.

    Args:
        name: ``cpp``, ``triton`` or ``autograd``; ``auto`` takes the fastest that serves.

    Raises:
        ValueError: an unknown name. A backend that cannot serve a call raises RuntimeError there.
    """
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: choose one of {', '.join(BACKENDS)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def retract(
    h: Tensor,
    f: Tensor,
    *,
    alpha: Tensor | float = 1.0,
    p: Tensor | float = 1.0,
    angle: Angle | None = None,
    radius: Tensor | float | None = None,
) -> Tensor:
    """Rotate the hidden state ``h`` towards the tangent part of the update ``f``; the norm of ``h`` is kept.

    ``h' = cos(theta) h + sin(theta) |h| w/|w|`` with ``w = alpha (f - <h,f>/|h|^2 h)``,
    ``theta = p arctan(beta/p)`` and ``beta = |w|/|h|`` (Sphere Retraction Normalizations, arXiv 2608.02668). Row
    statistics are float32 or better (float64 if an input is).

    Args:
        h: hidden state, (..., d), any floating dtype.
        f: sublayer output, same shape as ``h``; its dtype may differ.
        alpha: step size, a float or a tensor that broadcasts to (..., 1), for example of shape (1,).
        p: exponent in (0, inf], a float or a tensor (which may require grad) that broadcasts to (..., 1). Beyond p = 2
            a large step can rotate past the antipode of ``h``. The values of tensors are not checked.
        angle: any differentiable scalar function ``theta(beta)`` in radians with ``theta(0) = 0`` and unit slope;
            ``p`` is then ignored.
        radius: if given, the result has this norm instead of the norm of ``h`` (a float or broadcastable tensor).

    Returns:
        Tensor of the shape and dtype of ``h``. A row of ``h`` that is zero has no direction and stays (almost exactly)
        zero.

    Raises:
        ValueError: shapes that differ, ``p`` or ``radius`` out of range, a step with more than one value per row.
        TypeError: inputs that are not floating point.
        RuntimeError: a forced backend that cannot serve these arguments.
    """
    out, _ = rotate(h, f, alpha, p, radius, angle=angle)
    return out


def rotate(
    h: Tensor,
    f: Tensor,
    alpha: Tensor | float,
    p: Tensor | float,
    radius: Tensor | float | None = None,
    *,
    angle: Angle | None = None,
    lambda_l: float = 1.0,
    log_p: bool = False,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`retract` as a connection calls it: h' for the stream, and h' for the branch.

    Args:
        lambda_l: factor on ``alpha``, multiplied in by the kernel.
        log_p: ``p`` is the logarithm of the exponent, held in ``geometry.LOG_P_RANGE``.
        branch_dtype: if given, the second result is an output of its own in this dtype, whose gradient is added in the
            backward pass over the rows. Without it the second result is the first.
    """
    _check(h, f, alpha, p, radius)
    name, _ = _choose(h, f, alpha, p, radius, angle)
    if torch.compiler.is_compiling():
        # Equal layers share one compiled graph: as an argument of the operator lambda would be a constant of each.
        alpha, lambda_l = alpha * lambda_l, 1.0
    alpha, p = _as_tensor(alpha, h, f), _as_tensor(p, h, f)
    radius = None if radius is None else _as_tensor(radius, h, f)
    if name == "reference":
        dtype = compute_dtype(h, f)
        exponent = exponent_from_log(p) if log_p else p
        out = retract_rows(h.to(dtype), f.to(dtype), alpha * lambda_l, exponent, radius, angle).to(h.dtype)
        return out, out if branch_dtype is None else out.to(branch_dtype)
    if angle is not None:
        out = retract_with_angle(h, f, alpha * lambda_l, angle, radius, name)
        return out, out if branch_dtype is None else out.to(branch_dtype)
    result: Any = Retraction.apply(h, f, alpha, p, radius, None, None, lambda_l, log_p, branch_dtype, name)
    return (result, result) if branch_dtype is None else result


def which_backend(
    h: Tensor,
    f: Tensor,
    *,
    alpha: Tensor | float = 1.0,
    p: Tensor | float = 1.0,
    angle: Angle | None = None,
    radius: Tensor | float | None = None,
) -> Backend:
    """The backend that serves ``retract`` for these arguments, and the reason.

    Raises:
        RuntimeError: a forced backend that cannot serve them, or an unknown name in ``SPHERET_BACKEND``.
    """
    name, obstacle = _choose(h, f, alpha, p, radius, angle)
    if obstacle:
        return Backend(name, obstacle)
    how = f", {cpp.description()}" if name == "cpp" else ""
    return Backend(name, f"rows of {h.dtype} on {h.device.type}{how}")


def _choose(h: Tensor, f: Tensor, alpha: Any, p: Any, radius: Any, angle: Angle | None) -> tuple[str, str]:
    """Name of the backend, and why it is not a kernel, or the empty string."""
    if in_function_transform():
        return "reference", "inside a torch.func transform"
    formulas = "autograd" if angle is None else "reference"
    if _forced == "autograd":
        return formulas, "forced"
    name = "triton" if h.is_cuda or _forced == "triton" else "cpp"
    obstacle = _obstacle(h, f, (alpha, p, radius)) or (_triton_obstacle(h) if name == "triton" else _cpp_obstacle(h, f))
    if not obstacle and angle is not None and torch.compiler.is_compiling():
        obstacle = "a custom angle function, which the compiler fuses"
    if _forced not in ("auto", name) or (obstacle and _forced != "auto"):
        if _forced not in BACKENDS:
            raise RuntimeError(f"SPHERET_BACKEND={_forced!r}: choose one of {', '.join(BACKENDS)}")
        why = obstacle or f"tensors are on {h.device.type}"
        raise RuntimeError(f"the forced backend {_forced!r} cannot serve this call: {why}")
    return (formulas, obstacle) if obstacle else (name, "")


def _obstacle(h: Tensor, f: Tensor, scalars: tuple[Any, ...]) -> str:
    """Why no kernel can serve these arguments, or the empty string."""
    if h.device != f.device:
        return f"tensors are on {h.device} and {f.device}"
    if any(type(t) is not Tensor and is_traceable_wrapper_subclass(t) for t in (h, f)):
        return f"{type(h).__name__} and {type(f).__name__} are not plain tensors"
    if not torch.compiler.is_compiling() and (is_functorch_wrapped_tensor(h) or is_functorch_wrapped_tensor(f)):
        return "tensors of a torch.func transform that is over"
    for value in scalars:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                return "step, p or radius differ from row to row"
            if value.device != h.device:
                return f"step, p or radius are not on {h.device}"
            if type(value) is not Tensor and is_traceable_wrapper_subclass(value):
                return f"step, p or radius is a {type(value).__name__}, not a plain tensor"
    return ""


def _cpp_obstacle(h: Tensor, f: Tensor) -> str:
    if h.device.type != "cpu":
        return f"tensors are on {h.device.type}"
    if torch.float64 in (h.dtype, f.dtype):
        return "float64 rows: the C++ kernel computes in float32"
    return cpp.obstacle()


def _triton_obstacle(h: Tensor) -> str:
    if not _TRITON_INSTALLED:
        return 'Triton is not installed (pip install "spheret[kernels]")'
    if not h.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {h.device.type}, where Triton needs its interpreter (TRITON_INTERPRET=1)"
    if h.shape[-1] > LARGEST_TRITON_WIDTH:
        return f"rows of {h.shape[-1]:,} numbers do not fit into registers ({LARGEST_TRITON_WIDTH:,} do)"
    return ""


def in_function_transform() -> bool:
    """Whether a ``torch.func`` transform is active: ``vmap`` and ``jvp`` need operations that they know."""
    return peek_interpreter_stack() is not None


# The compiler enters the transforms that it traces, and has to be told to look instead of tracing this. It is what
# `torch.compiler.assume_constant_result` does besides importing the whole compiler.
in_function_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _as_tensor(value: Tensor | float, h: Tensor, f: Tensor) -> Tensor:
    """A scalar argument as a tensor (1,); a tensor stays as it is."""
    if isinstance(value, Tensor):
        return value
    value = LARGEST_P if value > LARGEST_P else value
    if torch.compiler.is_compiling():
        return torch.full((1,), value, dtype=compute_dtype(h, f), device=h.device)
    return _constant(float(value), compute_dtype(h, f), h.device)


@functools.lru_cache(maxsize=1024)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    # An ordinary tensor, whatever modes the first caller is in: a training step may be the second.
    with torch.inference_mode(False), _disable_current_modes():
        return torch.full((1,), value, dtype=dtype, device=device)


def _check(h: Tensor, f: Tensor, alpha: Any, p: Any, radius: Any) -> None:
    if h.shape != f.shape:
        raise ValueError(f"h has shape {tuple(h.shape)} but f has {tuple(f.shape)}: both must be (..., d) and equal")
    if h.dim() == 0 or h.shape[-1] == 0:
        raise ValueError(f"h has shape {tuple(h.shape)}: it needs a last dimension of at least 1")
    for name, tensor in (("h", h), ("f", f)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}: a retraction needs floating point; use {name}.float()")
    if not isinstance(p, Tensor) and not p > 0:
        raise ValueError(f"p = {p}: the exponent must lie in (0, inf]; p -> 0 is the identity map, p = inf is GeoNorm")
    if radius is not None and not isinstance(radius, Tensor) and not (0 < radius < math.inf):
        raise ValueError(f"radius = {radius}: it must be a positive finite number")
    for name, value in (("alpha", alpha), ("p", p), ("radius", radius)):
        if not isinstance(value, Tensor):
            continue
        if value.dim() > h.dim():
            raise ValueError(f"{name} has shape {tuple(value.shape)}: it must broadcast to one number per row of h")
        if value.dim() > 0 and value.shape[-1] != 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: it is one number per row at most, its last dimension must be 1"
            )
