"""The feed-forward sublayers: GPT-2's MLP, d -> 4d -> d with a GELU, and SwiGLU, d -> 2 x 4d -> d."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections.learned import ScaledVector
from spheret.connections.options import Factors, ModelOptions, Scaling
from spheret.models.weights import of_kind, scale_outputs, times

# Hidden units, in units of the width. SwiGLU has as many, as in nGPT, so it has half as many parameters again as the
# GELU MLP; LLaMA's 8/3 would make them equal.
HIDDEN = 4


class MLP(nn.Module):
    """GPT-2's MLP, (..., d) -> (..., d)."""

    def __init__(self, dim: int, *, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, HIDDEN * dim, bias=bias)
        self.c_proj = of_kind("mlp-out", nn.Linear(HIDDEN * dim, dim, bias=bias))
        self.dropout = nn.Dropout(dropout)

    def stream_axes(self) -> dict[str, int]:
        """Axis of the residual stream in each weight; see ``connections.weights``."""
        return {"c_fc.weight": 1, "c_proj.weight": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class SwiGLU(nn.Module):
    """``W_d (u silu(v))``, where u and v are the halves of ``W x`` (Shazeer, arXiv 2002.05202), (..., d) -> (..., d).

    ``scale`` adds a learned vector that multiplies both halves. ``factors`` holds the constants: ``up`` on u, ``gate``
    on v and ``down`` on the output.
    """

    def __init__(
        self,
        dim: int,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        scale: Scaling | None = None,
        factors: Factors = Factors(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, 2 * HIDDEN * dim, bias=bias)
        self.c_proj = of_kind("mlp-out", nn.Linear(HIDDEN * dim, dim, bias=bias))
        self.scale = None if scale is None else ScaledVector(2 * HIDDEN * dim, scale)
        self.factors = factors
        self.dropout = nn.Dropout(dropout)

    def stream_axes(self) -> dict[str, int]:
        """Axis of the residual stream in each weight; see ``connections.weights``."""
        return {"c_fc.weight": 1, "c_proj.weight": 0}

    def forward(self, x: Tensor) -> Tensor:
        uv = self.c_fc(x)
        if self.scale is not None:
            uv = uv * self.scale().to(uv.dtype)
        u, v = uv.chunk(2, dim=-1)
        y = self.c_proj(times(u, self.factors.up) * F.silu(times(v, self.factors.gate)))
        return self.dropout(times(y, self.factors.down))

    def fold(self) -> None:
        """Multiply the constant factors into the weights, in place."""
        # c_fc holds both halves: its first outputs are u, the rest v.
        outputs = torch.full_like(self.c_fc.weight[:, 0], self.factors.up)
        outputs[len(outputs) // 2 :] = self.factors.gate
        scale_outputs(self.c_fc, outputs)
        scale_outputs(self.c_proj, self.factors.down)
        self.factors = Factors()


def build_mlp(dim: int, options: ModelOptions, *, dropout: float, bias: bool) -> nn.Module:
    """The MLP that ``options.mlp`` names."""
    if options.mlp == "gelu":
        return MLP(dim, dropout=dropout, bias=bias)
    return SwiGLU(dim, dropout=dropout, bias=bias, scale=options.mlp_scale, factors=options.factors)
