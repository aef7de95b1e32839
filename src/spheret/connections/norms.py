"""The normalisations that a scheme may choose between, and the two ends of a stream that is normalised there."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from spheret.connections.base import Stream
from spheret.connections.scalars import Float32Module
from spheret.geometry import compute_dtype

NormKind = Literal["layernorm", "rmsnorm"]
EPS = 1e-5  # GPT-2's


def build_norm(kind: NormKind, dim: int, eps: float = EPS) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm or RMSNorm over the last ``dim`` entries with one gain, initially 1, and no bias."""
    return nn.LayerNorm(dim, eps=eps, bias=False) if kind == "layernorm" else nn.RMSNorm(dim, eps=eps)


class Float32Norm(Float32Module):
    """A norm that reads, computes and answers in float32 (float64 for float64 inputs), its gain float32 as well."""

    def __init__(self, kind: NormKind, dim: int, eps: float = EPS) -> None:
        super().__init__()
        self.norm = build_norm(kind, dim, eps)

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(compute_dtype(x)))


class NormedEnds(Stream):
    """A norm before the head, and one behind the embedding or none (``entry=False``)."""

    def __init__(self, kind: NormKind, dim: int, *, entry: bool, eps: float = EPS) -> None:
        super().__init__()
        self.entry = build_norm(kind, dim, eps) if entry else None
        self.final = build_norm(kind, dim, eps)

    def reset_parameters(self) -> None:
        for norm in (self.entry, self.final):
            if norm is not None:
                norm.reset_parameters()

    def enter(self, h: Tensor) -> Tensor:
        return h if self.entry is None else self.entry(h)

    def exit(self, h: Tensor) -> Tensor:
        return self.final(h)
