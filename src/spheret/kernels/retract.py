"""``retract``: check the arguments, then choose and run a backend. ``which_backend`` returns the choice and the reason.

``with spheret.backend("autograd"):`` forces a backend; so does ``SPHERET_BACKEND=autograd``, read at import.
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
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from spheret.geometry import Angle, compute_dtype, exponent_from_log, retract_rows
from spheret.kernels import cpp
from spheret.kernels.autograd import Retraction, retract_with_angle

BACKENDS = ("auto", "cpp", "triton", "autograd")
LARGEST_P = 1e30  # gives the same bits as p = inf, and a compiled model's package can serialise it, unlike inf
LARGEST_TRITON_WIDTH = 16_384  # longest row that fits into the registers of a Triton program

_FLOATS, _ONE = (torch.float32, torch.bfloat16, torch.float16), torch.Size((1,))

_forced = os.environ.get("SPHERET_BACKEND", "auto")
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class Backend(NamedTuple):
    """The implementation that runs a retraction, and the reason for the choice.

    ``cpp``: the C++ kernel on CPUs. ``triton``: the Triton kernels on GPUs. ``autograd``: the formulas in PyTorch
    operations.
    """

    name: str
    reason: str


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend for all retractions inside the ``with`` block, in every thread of the process.

    Args:
        name: ``cpp``, ``triton`` or ``autograd``; ``auto`` takes the fastest that can run.

    Raises:
        ValueError: an unknown name. A retraction that the forced backend cannot run raises RuntimeError.
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
        angle: a differentiable ``theta(beta)`` in radians with ``theta(0) = 0`` and unit slope; ``p`` is then ignored.
        radius: if given, the result has this norm instead of the norm of ``h`` (a float or broadcastable tensor).

    Returns:
        Tensor of the shape and dtype of ``h``. A row of zeros has no direction and stays (almost exactly) zero.

    Raises:
        ValueError: shapes that differ, ``p`` or ``radius`` out of range, a step with more than one value per row.
        TypeError: inputs that are not floating point, or None for a scalar that is needed.
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
        log_p: ``p`` is the logarithm of the exponent, clamped to ``geometry.LOG_P_RANGE``.
        branch_dtype: if given, the second result is a separate output in this dtype, whose gradient is added in the
            backward pass over the rows. If None, both results are the same tensor.
    """
    if angle is None and _is_plain_call(h, f, alpha, p, radius):
        name = "cpp"
    else:
        _check(h, f, alpha, p, radius)
        name, _ = _choose(h, f, (alpha, p, radius), angle)
    if torch.compiler.is_compiling():
        # Equal layers share one compiled graph: as a float argument of the operator, lambda_l would be baked into it.
        alpha, lambda_l = alpha * lambda_l, 1.0
    alpha, p = _as_tensor(alpha, h, f), _as_tensor(p, h, f)
    radius = None if radius is None else _as_tensor(radius, h, f)
    if name == "autograd" and (angle is not None or in_function_transform()):
        dtype = compute_dtype(h, f)
        exponent = exponent_from_log(p) if log_p else p
        out = retract_rows(h.to(dtype), f.to(dtype), alpha * lambda_l, exponent, radius, angle).to(h.dtype)
    elif angle is not None:
        out = retract_with_angle(h, f, alpha * lambda_l, angle, radius, name)
    else:
        result: Any = Retraction.apply(h, f, alpha, p, radius, None, None, lambda_l, log_p, branch_dtype, name)
        return (result, result) if branch_dtype is None else result
    return out, out if branch_dtype is None else out.to(branch_dtype)


def which_backend(
    h: Tensor,
    f: Tensor,
    *,
    alpha: Tensor | float = 1.0,
    p: Tensor | float = 1.0,
    angle: Angle | None = None,
    radius: Tensor | float | None = None,
) -> Backend:
    """The backend that ``retract`` uses for these arguments, and the reason.

    Raises:
        RuntimeError: the forced backend cannot run them, or ``SPHERET_BACKEND`` has an unknown name.
    """
    name, obstacle = _choose(h, f, (alpha, p, radius), angle)
    how = f", {cpp.description()}" if name == "cpp" else ""
    return Backend(name, obstacle or f"rows of {h.dtype} on {h.device.type}{how}")


def _is_plain_call(h: Tensor, f: Tensor, alpha: Any, p: Any, radius: Any) -> bool:
    """Whether `_check` would pass and `_choose` return cpp, in the ordinary case of training on CPUs. This shortcut
    exists because, in a small model, the full checks of those two take longer than the rows themselves."""
    return (
        type(h) is Tensor
        and type(f) is Tensor
        and h.is_cpu
        and f.is_cpu
        and h.dtype in _FLOATS
        and f.dtype in _FLOATS
        and (shape := h.shape) == f.shape
        and len(shape) > 0
        and shape[-1] > 0
        and _is_number(alpha)
        and (p > 0 if type(p) is float else _is_number(p))
        and (radius is None or _is_number(radius))
        and _forced == "auto"
        and not in_function_transform()
        and not cpp.obstacle()
    )


def _is_number(value: Any) -> bool:
    return type(value) in (Tensor, Parameter) and value.shape == _ONE and value.is_cpu


def _choose(h: Tensor, f: Tensor, scalars: tuple[Any, ...], angle: Angle | None) -> tuple[str, str]:
    """Name of the backend, and why it is not a kernel (the empty string for a kernel)."""
    if in_function_transform():
        return "autograd", "inside a torch.func transform"
    if _forced == "autograd":
        return "autograd", "forced"
    kernel = "triton" if h.is_cuda or _forced == "triton" else "cpp"
    obstacle = _obstacle(kernel, h, f, scalars)
    if not obstacle and angle is not None and torch.compiler.is_compiling():
        obstacle = "a custom angle function, which the compiler fuses"
    if _forced != "auto" and (obstacle or kernel != _forced):
        if _forced not in BACKENDS:
            raise RuntimeError(f"SPHERET_BACKEND={_forced!r}: choose one of {', '.join(BACKENDS)}")
        why = obstacle or f"tensors are on {h.device.type}"
        raise RuntimeError(f"the forced backend {_forced!r} cannot serve this call: {why}")
    return ("autograd", obstacle) if obstacle else (kernel, "")


def _obstacle(kernel: str, h: Tensor, f: Tensor, scalars: tuple[Any, ...]) -> str:
    """Why a kernel cannot run these arguments, or the empty string."""
    device, kind = h.device, h.device.type
    if f.device != device:
        return f"tensors are on {device} and {f.device}"
    if torch.float64 in (h.dtype, f.dtype):
        return "float64 rows: the kernels compute in float32"
    for t in (h, f, *scalars):
        if isinstance(t, Tensor) and type(t) is not Tensor and is_traceable_wrapper_subclass(t):
            return f"a {type(t).__name__} is not a plain tensor"
    for value in scalars:
        if isinstance(value, Tensor) and value.numel() != 1:
            return "step, p or radius differ from row to row"
        if isinstance(value, Tensor) and value.device != device:
            return f"step, p or radius are not on {device}"
    if kernel == "cpp":
        return cpp.obstacle() if kind == "cpu" else f"tensors are on {kind}"
    if not _TRITON_INSTALLED:
        return 'Triton is not installed (pip install "spheret[kernels]")'
    if not h.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {kind}, where Triton needs its interpreter (TRITON_INTERPRET=1)"
    if h.shape[-1] > LARGEST_TRITON_WIDTH:
        return f"rows of {h.shape[-1]:,} numbers do not fit into registers ({LARGEST_TRITON_WIDTH:,} do)"
    return ""


def in_function_transform() -> bool:
    """Whether a ``torch.func`` transform is active: ``vmap`` and ``jvp`` cannot transform the kernels."""
    return peek_interpreter_stack() is not None


# Makes the compiler call this function while tracing: `assume_constant_result` without importing the compiler.
in_function_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _as_tensor(value: Tensor | float, h: Tensor, f: Tensor) -> Tensor:
    """A scalar argument as a tensor (1,); a tensor is returned unchanged."""
    if isinstance(value, Tensor):
        return value
    value = LARGEST_P if value > LARGEST_P else value
    dtype = torch.float64 if torch.float64 in (h.dtype, f.dtype) else torch.float32
    if torch.compiler.is_compiling() or type(h) is not Tensor or torch._C._len_torch_dispatch_stack():
        return h.new_full((1,), value, dtype=dtype)  # of the same kind as h, for example a fake tensor
    return _constant(float(value), dtype, h.device)


@functools.lru_cache(maxsize=1024)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    # An ordinary tensor in any mode of the first caller: it is cached, and the next caller may be a training step.
    with torch.inference_mode(False), _disable_current_modes():
        return torch.full((1,), value, dtype=dtype, device=device)


def _check(h: Tensor, f: Tensor, alpha: Any, p: Any, radius: Any) -> None:
    shape = h.shape
    if shape != f.shape:
        raise ValueError(f"h has shape {tuple(shape)} but f has {tuple(f.shape)}: both must be (..., d) and equal")
    if not shape or shape[-1] == 0:
        raise ValueError(f"h has shape {tuple(shape)}: it needs a last dimension of at least 1")
    for name, tensor in (("h", h), ("f", f)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}: a retraction needs floating point; use {name}.float()")
    if alpha is None or p is None:
        raise TypeError(f"{'alpha' if alpha is None else 'p'} is None: give a number or a tensor")
    if not isinstance(p, Tensor) and not p > 0:
        raise ValueError(f"p = {p}: the exponent must lie in (0, inf]; p -> 0 is the identity map, p = inf is GeoNorm")
    if radius is not None and not isinstance(radius, Tensor) and not (0 < radius < math.inf):
        raise ValueError(f"radius = {radius}: it must be a positive finite number")
    for name, value in (("alpha", alpha), ("p", p), ("radius", radius)):
        if isinstance(value, Tensor) and (value.dim() > len(shape) or (value.dim() > 0 and value.shape[-1] != 1)):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: it must broadcast to one number per row of h, (..., 1)"
            )
