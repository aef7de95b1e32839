"""The feed-forward sublayer of GPT-2: a GELU between two projections of four times the width."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """(..., d) -> (..., d)."""

    def __init__(self, dim: int, *, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, 4 * dim, bias=bias)
        self.c_proj = nn.Linear(4 * dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))
