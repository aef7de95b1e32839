"""Rotary positions (RoFormer, arXiv 2104.09864): position m turns the plane (x_i, x_{i + d_h/2}) of a head by the angle
``m base^(-2i/d_h)``, i = 0 .. d_h/2 - 1.

A true rotation: norms are kept, and <R_m q, R_n k> depends on m - n alone. Which entries form a plane is a convention;
this one, halves and not neighbours, is that of GPT-NeoX, LLaMA and the transformers library. (The code of nGPT pairs
neighbours and multiplies them by (cos, sin) without forming the sum, which is no rotation.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(length: int, head_dim: int, *, base: float = 10_000.0, device: torch.device | None = None) -> Tensor:
    """Angles (length, head_dim / 2) of positions 0 .. length - 1, in radians and float32: in bfloat16 all positions
    from 256 to 257 would be one."""
    plane = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    return torch.outer(torch.arange(length, dtype=torch.float32, device=device), base ** (-plane / head_dim))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` (..., length, d_h) with every position turned by its ``angles`` (length, d_h / 2), in the dtype of ``x``
    promoted to at least float32."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
