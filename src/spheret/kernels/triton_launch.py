"""The Triton kernels as functions on tensors, with the signatures of the operators in :mod:`spheret.kernels.ops`.

``h``, ``f`` and gradients are (..., d) with d up to 16,384, each float32, bfloat16 or float16, with any strides.
``alpha``, ``p`` and ``radius`` are tensors of one element, so nothing waits for the device and a CUDA graph can record
each function. Results are contiguous, nothing else is written, and no sum depends on the order of the programs.

In Triton's interpreter (``TRITON_INTERPRET=1`` set before Triton is imported), this code runs on CPU tensors, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from spheret.kernels import triton_kernels


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
    """See ``ops.retract``. The third result holds eight statistics per row, (rows, 8)."""
    x, y = _as_rows(h), _as_rows(f)
    out = h.new_empty(h.shape)
    branch = None if branch_dtype is None else h.new_empty(h.shape, dtype=branch_dtype)
    stats = h.new_empty((x.shape[0], triton_kernels.STATS), dtype=torch.float32)
    tensors = x, y, alpha, p, radius, theta, out, branch, stats
    _launch(triton_kernels.retract_kernel, x, y, *tensors, lambda_l=lambda_l, LOG_P=log_p)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``ops.retract_backward``."""
    x, y, up = _as_rows(h), _as_rows(f), _as_rows(g)
    up_branch = None if g_branch is None else _as_rows(g_branch)
    dh, df = h.new_empty(h.shape), f.new_empty(f.shape)
    sums = h.new_empty((3, x.shape[0]), dtype=torch.float32)
    _launch(
        triton_kernels.retract_backward_kernel,
        *(x, y, up, up_branch, x, y, kept, alpha, p, radius, slope, dh, df, sums),
        lambda_l=lambda_l,
        g_stride=up.stride(0),
        g_branch_stride=0 if up_branch is None else up_branch.stride(0),
        LOG_P=log_p,
        NEED_P=need_p or theta is not None,
    )
    of_alpha, of_p, of_radius = sums.sum(1, dtype=torch.float64).unbind()
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
    x, y = _as_rows(h), _as_rows(f)
    beta = h.new_empty(x.shape[0], dtype=torch.float64)
    _launch(triton_kernels.update_size_kernel, x, y, x, y, alpha, beta)
    return beta


def program_size(d: int) -> tuple[int, int, int]:
    """Rows per program, columns per row (a power of two), and warps per program, for width d.

    Every warp of a row repeats the computations on row scalars, so each warp takes as much of a row as its registers
    can hold.
    """
    block = triton.next_power_of_2(d)
    per_warp = 1024 if block <= 4096 else 512
    return min(32, max(1, 512 // block)), block, max(1, block // per_warp)


def _launch(kernel: Any, h: Tensor, f: Tensor, *tensors: Tensor | None, **options: Any) -> None:
    """Run a kernel over the rows of h and f, (rows, d), each row contiguous."""
    n, d = h.shape
    if n == 0:
        return
    rows, block, warps = program_size(d)
    with torch.cuda.device_of(h):
        kernel[(triton.cdiv(n, rows),)](
            *tensors,
            **options,
            **{"n": n, "d": d, "h_stride": h.stride(0), "f_stride": f.stride(0)},
            **{"BLOCK_N": rows, "BLOCK_D": block, "num_warps": warps, "enable_fp_fusion": True},
        )


def _as_rows(t: Tensor) -> Tensor:
    """(..., d) -> (rows, d), a view if each row is contiguous, else a copy."""
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
