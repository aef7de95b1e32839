"""The Triton kernels as functions on tensors, with the signatures of the operators in :mod:`spheret.kernels.ops`.

``h``, ``f`` and gradients are (..., d) with d up to 16,384, each float32, bfloat16, float16 or float64, with any
strides. ``alpha``, ``p`` and ``radius`` are tensors of one element: nothing here waits for the device, so a CUDA graph
can record it. Results are contiguous, nothing else is written, and no sum depends on the order in which programs run.

In Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported) the same code runs on CPU tensors, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spheret.geometry import compute_dtype
from spheret.kernels import triton_kernels

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def retract(
    h: Tensor,
    f: Tensor,
    alpha: Tensor,
    p: Tensor,
    radius: Tensor | None,
    lambda_l: float,
    log_p: bool,
    theta: Tensor | None,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.retract``; the third result holds eight statistics of each row, (rows, 8)."""
    rows = _Rows(h, f)
    out = rows.new_like(h.dtype)
    branch = None if branch_dtype is None else rows.new_like(branch_dtype)
    stats = h.new_empty((rows.n, triton_kernels.STATS), dtype=rows.dtype)
    alpha, lambda_l = rows.step(alpha, lambda_l)
    tensors = rows.h, rows.f, alpha, p.detach(), _detached(radius), _detached(theta), out, branch, stats
    rows.launch(triton_kernels.retract_kernel, *tensors, lambda_l=lambda_l, LOG_P=log_p)
    return out, h.new_empty(0) if branch is None else branch, stats


def retract_backward(
    g: Tensor,
    g_branch: Tensor | None,
    h: Tensor,
    f: Tensor,
    kept: Tensor,
    alpha: Tensor,
    p: Tensor,
    radius: Tensor | None,
    lambda_l: float,
    log_p: bool,
    theta: Tensor | None,
    slope: Tensor | None,
    need_p: bool,
) -> Gradients:
    """See ``ops.retract_backward``."""
    rows = _Rows(h, f)
    dh, df = rows.new_like(h.dtype), rows.new_like(f.dtype)
    sums = h.new_empty((3, rows.n), dtype=rows.dtype)
    g = _as_rows(g)
    branch = None if g_branch is None else _as_rows(g_branch)
    step, factor = rows.step(alpha, lambda_l)
    scalars = step, p.detach(), _detached(radius), _detached(slope)
    rows.launch(
        triton_kernels.retract_backward_kernel,
        *(g, branch, rows.h, rows.f, kept, *scalars, dh, df, sums),
        lambda_l=factor,
        g_stride=g.stride(0),
        g_branch_stride=0 if branch is None else branch.stride(0),
        LOG_P=log_p,
        NEED_P=need_p or theta is not None,
    )
    of_alpha, of_p, of_radius = sums.sum(1, dtype=torch.float64).unbind()
    if factor != lambda_l:
        of_alpha = of_alpha * lambda_l
    return (
        dh,
        df,
        of_alpha.to(alpha.dtype).reshape(alpha.shape),
        of_p.to(p.dtype).reshape(p.shape),
        alpha.new_empty(0) if radius is None else of_radius.to(radius.dtype).reshape(radius.shape),
        sums[1].double() if theta is not None else h.new_empty(0, dtype=torch.float64),
    )


def update_size(h: Tensor, f: Tensor, alpha: Tensor) -> Tensor:
    """See ``ops.update_size``."""
    rows = _Rows(h, f)
    beta = h.new_empty(rows.n, dtype=torch.float64)
    rows.launch(triton_kernels.update_size_kernel, rows.h, rows.f, alpha.detach(), beta)
    return beta


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

    def new_like(self, dtype: torch.dtype) -> Tensor:
        return self.h.new_empty(self.shape, dtype=dtype)

    def step(self, alpha: Tensor, lambda_l: float) -> tuple[Tensor, float]:
        """alpha and lambda for a kernel, which takes numbers as float32: float64 rows multiply the two here."""
        alpha = alpha.detach()
        return (alpha.double() * lambda_l, 1.0) if self.dtype is torch.float64 else (alpha, lambda_l)

    def launch(self, kernel: Any, *tensors: Tensor | None, **options: Any) -> None:
        if self.n == 0:
            return
        rows, block, warps = program_size(self.d)
        with torch.cuda.device_of(self.h):
            kernel[(triton.cdiv(self.n, rows),)](
                *tensors,
                n=self.n,
                d=self.d,
                h_stride=self.h.stride(0),
                f_stride=self.f.stride(0),
                BLOCK_N=rows,
                BLOCK_D=block,
                DTYPE=tl.float64 if self.dtype is torch.float64 else tl.float32,
                num_warps=warps,
                enable_fp_fusion=True,
                **options,
            )


def _as_rows(t: Tensor) -> Tensor:
    """(..., d) -> (rows, d), a view where the numbers of a row lie side by side."""
    rows = t.detach().reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()
