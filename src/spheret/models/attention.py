"""Causal self-attention in nanoGPT's layout: one packed projection for q, k and v, one output projection.

Optionally, queries and keys are normalised head by head and rotated by their positions. The norm is an RMSNorm with a
gain before the rotation (as in Qwen3), or a division by the norm times a learned scale after it (as in nGPT).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections.learned import ScaledVector
from spheret.connections.norms import RMSNorm
from spheret.connections.options import Factors, ModelOptions
from spheret.kernels import unit
from spheret.models.weights import of_kind, scale_outputs, times


class CausalSelfAttention(nn.Module):
    """(B, T, d) -> (B, T, d); ``n_head`` must divide ``dim``, and ``rope`` needs heads of even width."""

    def __init__(
        self,
        dim: int,
        n_head: int,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        options: ModelOptions = ModelOptions(),  # noqa: B008
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.dropout = n_head, dim // n_head, dropout
        self.rope_base = rope_base if options.positions == "rope" else None
        self.factors = options.factors
        self.c_attn = of_kind("qkv", nn.Linear(dim, 3 * dim, bias=bias))
        self.c_proj = nn.Linear(dim, dim, bias=bias)
        rms = options.qk_norm == "rms"
        self.q_norm = RMSNorm(self.head_dim) if rms else None
        self.k_norm = RMSNorm(self.head_dim) if rms else None
        self.qk_scale = ScaledVector(dim, options.qk_scale) if options.qk_norm == "l2" else None
        # The product of two vectors of norm 1 is a cosine, with a spread of about 1/sqrt(d_h). Times sqrt(d_h), it has
        # the spread of the usual scores <q, k>/sqrt(d_h).
        unit_norm = options.qk_norm == "l2" or (options.qk_norm == "none" and options.unit_heads)
        self.softmax_scale = math.sqrt(self.head_dim) if unit_norm else None
        self.resid_dropout = nn.Dropout(dropout)

    def stream_axes(self) -> dict[str, int]:
        """Axis of the residual stream in each weight; see ``connections.weights``."""
        return {"c_attn.weight": 1, "c_proj.weight": 0}

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = times(self.c_attn(x), self.factors.qkv)
        q, k, v = (t.view(batch, length, self.n_head, self.head_dim).transpose(1, 2) for t in qkv.split(dim, dim=2))
        q, k = self.prepare(q, k)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
        )
        y = self.c_proj(y.transpose(1, 2).reshape(batch, length, dim))
        return self.resid_dropout(times(y, self.factors.attn_out))

    def fold(self) -> None:
        """Multiply the constant factors into the weights, in place."""
        scale_outputs(self.c_attn, self.factors.qkv)
        scale_outputs(self.c_proj, self.factors.attn_out)
        self.factors = Factors()

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and rotate queries and keys (B, heads, T, d_h); the results have the dtype of ``q``."""
        dtype = q.dtype
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            angles = rope_angles(q.shape[-2], self.head_dim, base=self.rope_base, device=q.device)
            q, k = rotate(q, angles), rotate(k, angles)
        if self.qk_scale is not None:
            scale = self.qk_scale().view(self.n_head, 1, self.head_dim)
            q, k = scale * unit(q), scale * unit(k)
        # The rotation and the learned scale are float32; v is not, and scaled_dot_product_attention needs one dtype.
        return q.to(dtype), k.to(dtype)


def rope_angles(length: int, head_dim: int, *, base: float = 10_000.0, device: torch.device | None = None) -> Tensor:
    """Angles (length, head_dim / 2) of positions 0 .. length - 1, in radians.

    They are float32: bfloat16 cannot tell position 256 from 257.
    """
    plane = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    return torch.outer(torch.arange(length, dtype=torch.float32, device=device), base ** (-plane / head_dim))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` (..., length, d_h) with every position rotated by its ``angles`` (length, d_h / 2), in float32 or better.

    Rotary positions (RoFormer, arXiv 2104.09864): position m rotates the plane (x_i, x_{i + d_h/2}) of a head by the
    angle ``m base^(-2i/d_h)``, i = 0 .. d_h/2 - 1. Norms are kept, and <R_m q, R_n k> depends only on m - n. Entry i of
    the first half of a head is paired with entry i of the second half, as in GPT-NeoX, LLaMA and the transformers
    library. (nGPT's code pairs neighbours and multiplies them by (cos, sin) without adding the products, which is not a
    rotation.)
    """
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
