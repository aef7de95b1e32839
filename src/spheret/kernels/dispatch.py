"""``retract``: checked arguments, then the path that serves them. ``which_backend`` says which one that is, and why.

``SPHERET_BACKEND`` (read when the package is imported) forces a path: ``numba``, ``triton``, ``autograd`` or, by
default, ``auto``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spheret.geometry import Angle, Exponent, LogExponent, compute_dtype, retract_rows
from spheret.kernels import cpu, gpu, operator
from spheret.kernels.autograd import Retraction
from spheret.kernels.custom_angle import retract_with_angle
from spheret.kernels.fused import FusedRetraction
from spheret.kernels.rows import RowRetraction, apply_untransformed, exponent_arguments
from spheret.kernels.rows import kernels as row_kernels

F32 = torch.float32
_ONE = torch.Size((1,))
_peek_transforms = torch._C._functorch.peek_interpreter_stack


class Backend(NamedTuple):
    """``numba``, ``triton``: one compiled loop or kernel per direction. ``autograd``: PyTorch operations with the
    hand-written backward.
    ``reference``: PyTorch operations throughout."""

    name: str
    reason: str


def retract(
    h: Tensor,
    f: Tensor,
    *,
    alpha: Tensor | float = 1.0,
    decay: Tensor | None = None,
    p: Exponent | LogExponent = 1.0,
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
        decay: factor on ``alpha``, such as lambda_l = 1/sqrt(l); the fast path takes both and multiplies them itself.
        p: exponent in (0, inf], a float or a tensor (which may require grad) that broadcasts to (..., 1), or the
            logarithm of one that is learned. Beyond p = 2 a large step can rotate past the antipode of ``h``. The
            values of tensors are not checked.
        angle: any differentiable scalar function ``theta(beta)`` in radians with ``theta(0) = 0`` and unit slope;
            ``p`` is then ignored.
        radius: if given, the result has this norm instead of the norm of ``h`` (a float or broadcastable tensor).

    Returns:
        Tensor of the shape and dtype of ``h``. A row of ``h`` that is zero has no direction and stays (almost exactly)
        zero.

    Raises:
        ValueError: shapes that differ, ``p`` or ``radius`` out of range, a step with more than one value per row.
        TypeError: inputs that are not floating point.
        RuntimeError: a backend that was forced and cannot run here.
    """
    out, _ = _retract(h, f, alpha, decay, p, angle, radius, read_dtype=None)
    return out


def retract_for_two(
    h: Tensor,
    f: Tensor,
    *,
    alpha: Tensor | float = 1.0,
    decay: Tensor | None = None,
    p: Exponent | LogExponent = 1.0,
    radius: Tensor | float | None = None,
    read_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`retract` with one output for each reader: the next hidden state, and the same in ``read_dtype`` (default:
    that of ``h``) for the next sublayer. The compiled paths add the two gradients in their own pass over the rows."""
    out, read = _retract(h, f, alpha, decay, p, None, radius, read_dtype=read_dtype or h.dtype)
    return out, out if read is None else read


def _retract(
    h: Tensor,
    f: Tensor,
    alpha: Tensor | float,
    decay: Tensor | None,
    p: Exponent | LogExponent,
    angle: Angle | None,
    radius: Tensor | float | None,
    read_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    result: Any
    traced = torch.compiler.is_compiling()
    if (
        angle is None
        and (read_dtype is None or read_dtype is h.dtype)
        and _ordinary(h, f, alpha, decay, p, radius)
        and not in_function_transform()
        and (not cpu.unavailable() if traced else _serves_eager(h, f))
    ):
        apply = RowRetraction.apply if traced else apply_untransformed
        result = apply(h, f, alpha, decay, *exponent_arguments(p), radius, read_dtype is not None)
        return (result, None) if read_dtype is None else result
    p = p.value() if isinstance(p, LogExponent) else p
    _check(h, f, alpha, p, radius)
    p = p if isinstance(p, Tensor) else float(p)
    alpha = alpha if decay is None else alpha * decay
    backend = which_backend(h, f, alpha=alpha, p=p, angle=angle, radius=radius).name
    if backend in ("numba", "triton"):
        if angle is not None:
            return retract_with_angle(h, f, alpha, angle, radius), None
        result = FusedRetraction.apply(h, f, alpha, p, radius, read_dtype)
        return (result, None) if read_dtype is None else result
    if backend == "reference":
        dtype = compute_dtype(h, f)
        out = retract_rows(h.to(dtype), f.to(dtype), alpha, p, radius, angle).to(h.dtype)
    else:
        out = Retraction.apply(h, f, alpha, p, radius)
    return out, None if read_dtype in (None, h.dtype) else out.to(read_dtype)


def _ordinary(h: Tensor, f: Tensor, alpha: Any, decay: Any, p: Any, radius: Any) -> bool:
    """Whether this is training in float32 on a CPU with valid scalars: one look instead of all the questions below,
    whose answers would take a small model longer than the loops."""
    return (
        type(h) is Tensor
        and type(f) is Tensor
        and h.dtype is F32
        and f.dtype is F32
        and h.is_cpu
        and f.is_cpu
        and (shape := h.shape) == f.shape
        and len(shape) > 0
        and shape[-1] > 0
        and _is_scalar(alpha)
        and (decay is None or (_is_scalar(decay) and not decay.requires_grad))
        and (p > 0 if type(p) is float else _is_scalar(p.rho if type(p) is LogExponent else p))
        and (radius is None or _is_scalar(radius))
        and operator.FORCED == "auto"
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is F32 and value.shape == _ONE and value.is_cpu


def _serves_eager(h: Tensor, f: Tensor) -> bool:
    """Whether the loops are here, and these are no tensors of a function transform that is over."""
    return not is_functorch_wrapped_tensor(h) and not is_functorch_wrapped_tensor(f) and not cpu.import_error()


def which_backend(
    h: Tensor,
    f: Tensor,
    *,
    alpha: Tensor | float = 1.0,
    p: Exponent = 1.0,
    angle: Angle | None = None,
    radius: Tensor | float | None = None,
) -> Backend:
    """The path that ``retract`` takes for these arguments, and the reason.

    Raises:
        RuntimeError: ``SPHERET_BACKEND`` forces a path that cannot run, or names none.
    """
    forced = operator.FORCED
    if forced not in operator.BACKENDS:
        raise RuntimeError(f"SPHERET_BACKEND={forced!r}: choose one of {', '.join(operator.BACKENDS)}")
    if in_function_transform():
        return Backend("reference", "inside a torch.func transform")
    plain = "autograd" if angle is None else "reference"
    if forced == "autograd":
        return Backend(plain, "forced by SPHERET_BACKEND")
    kernels = operator.kernels(h)
    name = "triton" if kernels is gpu else "numba"
    obstacle = _obstacle(h, f, (alpha, p, radius)) or kernels.unavailable(h)
    if not obstacle and name == "numba" and torch.float64 in (h.dtype, f.dtype):
        obstacle = "float64 rows: the loops compute in float32"
    if not obstacle and angle is not None and torch.compiler.is_compiling():
        obstacle = "a custom angle function, which the compiler fuses"
    if forced in ("numba", "triton") and (obstacle or forced != name):
        raise RuntimeError(f"SPHERET_BACKEND={forced} cannot run here: {obstacle or f'tensors lie on {h.device.type}'}")
    if obstacle:
        return Backend(plain, obstacle)
    reason = f"rows of {h.dtype} on {h.device.type}"
    if name == "numba" and h.dtype is f.dtype is F32 and not torch.compiler.is_compiling():
        reason += f", {row_kernels.in_use()}"
    return Backend(name, reason)


def in_function_transform() -> bool:
    """Whether ``torch.func`` looks on: ``vmap`` and ``jvp`` want operations that they know."""
    return _peek_transforms() is not None


# The compiler enters the transforms that it traces, and has to be told to look instead of tracing this. It is what
# `torch.compiler.assume_constant_result` does besides importing the whole compiler.
in_function_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _obstacle(h: Tensor, f: Tensor, scalars: tuple[Any, ...]) -> str:
    """Why neither compiled loops nor kernels can serve these arguments, or the empty string."""
    if h.device != f.device:
        return f"tensors lie on {h.device} and {f.device}"
    if any(type(t) is not Tensor and is_traceable_wrapper_subclass(t) for t in (h, f)):
        return f"{type(h).__name__} and {type(f).__name__} are not plain tensors"
    tensors = [v for v in scalars if isinstance(v, Tensor)]
    if any(v.numel() != 1 for v in tensors):
        return "step, p or radius differ from row to row"
    if any(v.device != h.device for v in tensors):
        return f"step, p or radius do not lie on {h.device}"
    return ""


def _check(h: Tensor, f: Tensor, alpha: Tensor | float, p: Exponent, radius: Tensor | float | None) -> None:
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
