"""The Triton kernels on tensors: layouts, sizes of programs, and what is allocated.

``h``, ``f`` and gradients are (..., d) with d up to 16,384, each float32, bfloat16, float16 or float64, with
any strides. ``step``, ``p`` and ``radius`` are Python floats, or tensors on the same device with one element or one
per row: nothing here waits for the device, so that a CUDA graph can record it. Results are contiguous, nothing is
written but them, and no sum depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spheret.geometry import compute_dtype
from spheret.kernels import triton_rows

Scalar = Tensor | float


def forward(
    h: Tensor,
    f: Tensor,
    step: Scalar,
    p: Scalar,
    radius: Scalar | None = None,
    *,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The retraction in the dtype of ``h``, its copy in ``branch_dtype`` (None without one), and row statistics
    (rows, 8)."""
    rows = _Rows(h, f)
    out, branch, stats = rows.like(h.dtype), rows.like(branch_dtype), rows.stats()
    step, p, radius = rows.scalar(step), rows.scalar(p), rows.scalar(radius)
    rows.launch(
        triton_rows.forward_kernel,
        *(rows.h, rows.f, step, p, radius, out, branch, stats),
        STEP_STRIDE=_stride(step),
        P_STRIDE=_stride(p),
        RADIUS_STRIDE=_stride(radius),
    )
    return out, branch, stats


def backward(
    g: Tensor,
    branch_g: Tensor | None,
    h: Tensor,
    f: Tensor,
    stats: Tensor,
    step: Scalar,
    p: Scalar,
    radius: Scalar | None = None,
    *,
    kappa: Tensor | None = None,
    need_p: bool = True,
    need_sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``h`` and ``f``, and those of step, p and radius row by row, (3, rows).

    ``branch_g`` is the gradient of the second output of :func:`forward`. With ``kappa`` (rows,) the angle is a
    function of its own with that slope: ``p`` is not read, and the second row of the sums is the gradient of the
    angle. Without ``need_p`` that row is 0.
    """
    rows = _Rows(h, f)
    dh, df = rows.like(h.dtype), rows.like(f.dtype)
    sums = h.new_empty((3, rows.n), dtype=rows.dtype) if need_sums else None
    step, p, radius = rows.scalar(step), rows.scalar(p), rows.scalar(radius)
    g = _as_rows(g)
    branch_g = None if branch_g is None else _as_rows(branch_g)
    rows.launch(
        triton_rows.backward_kernel,
        *(g, branch_g, rows.h, rows.f, stats, step, p, radius, kappa, dh, df, sums),
        g_stride=g.stride(0),
        branch_g_stride=0 if branch_g is None else branch_g.stride(0),
        STEP_STRIDE=_stride(step),
        P_STRIDE=_stride(p),
        RADIUS_STRIDE=_stride(radius),
        NEED_P=need_p,
    )
    return dh, df, sums


def row_dots(h: Tensor, f: Tensor, step: Scalar) -> tuple[Tensor, Tensor]:
    """Row statistics (rows, 8), whose last two columns :func:`set_angle` fills, and beta (rows,)."""
    rows = _Rows(h, f)
    stats, step = rows.stats(), rows.scalar(step)
    beta = stats.new_empty(rows.n)
    rows.launch(triton_rows.dots_kernel, rows.h, rows.f, step, stats, beta, STEP_STRIDE=_stride(step))
    return stats, beta


def set_angle(stats: Tensor, beta: Tensor, theta: Tensor) -> None:
    """Complete the statistics of :func:`row_dots` with an angle theta (rows,) in radians."""
    sin, cos = torch.sin(theta / 2), torch.cos(theta / 2)
    stats[:, 6] = 2 * sin * sin
    stats[:, 7] = torch.where(beta > 0, 2 * sin * cos / beta.clamp_min(torch.finfo(beta.dtype).tiny), 1.0)


def combine(
    h: Tensor,
    f: Tensor,
    stats: Tensor,
    step: Scalar,
    radius: Scalar | None = None,
    *,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The retraction, and its copy in ``branch_dtype``, from complete statistics."""
    rows = _Rows(h, f)
    out, branch = rows.like(h.dtype), rows.like(branch_dtype)
    step, radius = rows.scalar(step), rows.scalar(radius)
    rows.launch(
        triton_rows.combine_kernel,
        *(rows.h, rows.f, step, radius, out, branch, stats),
        STEP_STRIDE=_stride(step),
        RADIUS_STRIDE=_stride(radius),
    )
    return out, branch


def program_size(d: int) -> tuple[int, int, int]:
    """Rows of a program, columns of a row (a power of two), and warps, for width d.

    What is computed once per row is computed by every warp of it, so a warp takes as much of a row as its registers
    hold.
    """
    block = triton.next_power_of_2(d)
    per_warp = 1024 if block <= 4096 else 512
    return min(32, max(1, 512 // block)), block, max(1, block // per_warp)


class _Rows:
    """Two tensors (..., d) as rows, and a launch over them."""

    def __init__(self, h: Tensor, f: Tensor) -> None:
        self.shape, self.d = h.shape, h.shape[-1]
        self.h, self.f = _as_rows(h), _as_rows(f)
        self.n = self.h.shape[0]
        self.dtype = compute_dtype(h, f)

    def like(self, dtype: torch.dtype | None) -> Any:
        return None if dtype is None else self.h.new_empty(self.shape, dtype=dtype)

    def stats(self) -> Tensor:
        return self.h.new_empty((self.n, triton_rows.STATS), dtype=self.dtype)

    def scalar(self, value: Scalar | None) -> Any:
        """A scalar argument as a kernel takes it: None, a number, or a flat tensor of one element or one per row."""
        if value is None:
            return None
        if not isinstance(value, Tensor):
            # A number reaches a kernel as float32.
            return value if self.dtype == torch.float32 else self.h.new_full((1,), value, dtype=self.dtype)
        if value.numel() == 1:
            return value.detach()
        return value.detach().expand(*self.shape[:-1], 1).reshape(-1).contiguous()

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        if self.n == 0:
            return
        rows, block, warps = program_size(self.d)
        with torch.cuda.device_of(self.h):
            kernel[(triton.cdiv(self.n, rows),)](
                *arguments,
                n=self.n,
                d=self.d,
                h_stride=self.h.stride(0),
                f_stride=self.f.stride(0),
                ROWS=rows,
                BLOCK=block,
                T=tl.float64 if self.dtype == torch.float64 else tl.float32,
                num_warps=warps,
                enable_fp_fusion=True,
                **options,
            )


def _as_rows(t: Tensor) -> Tensor:
    """(..., d) -> (rows, d), a view where the numbers of a row lie side by side."""
    rows = t.detach().reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _stride(scalar: Any) -> int | None:
    """Elements from one row's value to the next; None for a number."""
    if not isinstance(scalar, Tensor):
        return None
    return 0 if scalar.numel() == 1 else 1
