r"""Pre-LN: a LayerNorm in front of every sublayer and one before the head (GPT-2, nanoGPT).

    h' = h + F(LN(h))

The norm of ``h`` grows with depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, InitRule, Scheme, Stream

PreNormKind = Literal["layernorm", "rmsnorm", "none"]


def build_norm(kind: PreNormKind, dim: int, bias: bool) -> nn.LayerNorm | nn.RMSNorm | None:
    """LayerNorm or RMSNorm with eps 1e-5, its gain initially 1; RMSNorm has no bias."""
    if kind == "none":
        return None
    return nn.LayerNorm(dim, bias=bias) if kind == "layernorm" else nn.RMSNorm(dim, eps=1e-5)


class PreLN(Connection):
    """Euclidean residual with a norm (eps 1e-5) in front of the sublayer."""

    def __init__(self, dim: int, bias: bool = False, branch: float = 1.0, norm: PreNormKind = "layernorm") -> None:
        super().__init__()
        self.norm = build_norm(norm, dim, bias)
        self.branch = branch

    def reset_parameters(self) -> None:
        if self.norm is not None:
            self.norm.reset_parameters()

    def branch_input(self, h: Tensor) -> Tensor:
        return h if self.norm is None else self.norm(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        return h + f if self.branch == 1 else torch.add(h, f, alpha=self.branch)


class FinalNorm(Stream):
    """A norm before the head."""

    def __init__(self, dim: int, bias: bool = False, norm: PreNormKind = "layernorm") -> None:
        super().__init__()
        self.norm = build_norm(norm, dim, bias)

    def reset_parameters(self) -> None:
        if self.norm is not None:
            self.norm.reset_parameters()

    def exit(self, h: Tensor) -> Tensor:
        return h if self.norm is None else self.norm(h)


@dataclass(frozen=True, kw_only=True)
class PreLNScheme(Scheme):
    """Options of ``pre-ln``.

    Attributes:
        norm: layernorm or rmsnorm, for all norms; none leaves a bare addition, whose step no connection can beat.
        bias: norms have a bias besides their gain (layernorm alone).
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        branch: constant factor on every update.
        residual: further factor on the initial last projection of every sublayer; by default 1/sqrt(2L).
    """

    name: ClassVar[str] = "pre-ln"
    equation: ClassVar[str] = "h' = h + F(LN(h))"
    placement: ClassVar[str] = "LayerNorm in front of F and before the head"
    cost: ClassVar[str] = "11 units, 5 forward and 6 backward"
    source: ClassVar[str] = "GPT-2; nanoGPT (github.com/karpathy/nanoGPT)"

    norm: PreNormKind = "layernorm"
    bias: bool = False
    gain: float = 0.57
    embedding_gain: float = 1.0
    branch: float = 1.0
    residual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias and self.norm != "layernorm":
            raise ValueError(f"bias = true: norm={self.norm} has none; take norm=layernorm, or leave bias away")

    def stream(self, dim: int, n_layer: int) -> Stream:
        return FinalNorm(dim, self.bias, self.norm)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return PreLN(dim, self.bias, self.branch, self.norm)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(
            embedding_std=self.embedding_gain / math.sqrt(dim),
            gain=self.gain,
            residual_gain=1 / math.sqrt(SUBLAYERS_PER_LAYER * n_layer) if self.residual is None else self.residual,
        )
