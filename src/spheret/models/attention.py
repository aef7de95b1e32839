"""Causal self-attention in nanoGPT's layout: one packed projection for q, k and v, one output projection."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    """(B, T, d) -> (B, T, d); ``n_head`` must divide ``dim``."""

    def __init__(self, dim: int, n_head: int, *, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.c_attn = nn.Linear(dim, 3 * dim, bias=bias)
        self.c_proj = nn.Linear(dim, dim, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (t.view(batch, length, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(dim, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, length, dim)))
