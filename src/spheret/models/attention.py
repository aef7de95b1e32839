"""Causal self-attention in nanoGPT's layout: one packed projection for q, k and v, one output projection.

On request queries and keys are normalised head by head, by an RMSNorm with a gain in front of the rotation (as in
Qwen3) or to norm 1 times a learned scale behind it (as in nGPT), and rotated by their positions.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections.options import Factors, ModelOptions
from spheret.connections.rms import RMSNorm
from spheret.connections.scaled_vector import ScaledVector
from spheret.kernels import unit
from spheret.models.factors import scale_rows, times
from spheret.models.rope import rope_angles, rotate


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
        self.c_attn = nn.Linear(dim, 3 * dim, bias=bias)
        self.c_proj = nn.Linear(dim, dim, bias=bias)
        rms = options.qk_norm == "rms"
        self.q_norm = RMSNorm(self.head_dim) if rms else None
        self.k_norm = RMSNorm(self.head_dim) if rms else None
        self.qk_scale = ScaledVector(dim, options.qk_scale) if options.qk_norm == "l2" else None
        # Of vectors of norm 1 the product is a cosine, which sqrt(d_h) brings to the spread of the usual scores.
        unit_norm = options.qk_norm == "l2" or (options.qk_norm == "none" and options.unit_heads)
        self.softmax_scale = math.sqrt(self.head_dim) if unit_norm else None
        self.resid_dropout = nn.Dropout(dropout)

    def stream_axes(self) -> dict[str, int]:
        """Axis of the residual stream in each weight; see ``connections.constraints``."""
        return {"c_attn.weight": 1, "c_proj.weight": 0}

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = times(self.c_attn(x), self.factors.qkv)
        q, k, v = (t.view(batch, length, self.n_head, -1).transpose(1, 2) for t in qkv.split(dim, dim=2))
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
        """Multiply the factors into the weights."""
        scale_rows(self.c_attn, self.factors.qkv)
        scale_rows(self.c_proj, self.factors.attn_out)
        self.factors = Factors()

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and rotate queries and keys (B, heads, T, d_h), back in their own dtype."""
        dtype = q.dtype
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            angles = rope_angles(q.shape[-2], self.head_dim, base=self.rope_base, device=q.device)
            q, k = rotate(q, angles), rotate(k, angles)
        if self.qk_scale is not None:
            scale = self.qk_scale().view(self.n_head, 1, self.head_dim)
            q, k = scale * unit(q), scale * unit(k)
        return q.to(dtype), k.to(dtype)
