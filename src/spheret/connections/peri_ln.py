r"""Peri-LN: a norm in front of every sublayer and one behind it (arXiv 2502.02732).

    h' = h + Norm(F(Norm(h)))

The residual path itself is not normalised; the embedding and the input of the head are. At the start every update has
root mean square 1, whatever the scale of F, so that the variance of ``h`` grows linearly with depth: |h_n| =
sqrt(1 + n) |h_0| after n sublayers. The usual 1/sqrt(2L) on the last projection of a sublayer would leave the output
as it is and multiply that projection's gradient by sqrt(2L); it is 1 here.

Where each choice comes from. The equation, norms behind the embedding and before the head, gains that start at 1:
second hand (notes on the paper); that the norm behind the embedding is an option: from memory. LayerNorm or RMSNorm:
the paper. The growth with depth: second hand, and derived. eps: a guess (GPT-2's); it matters where F is as small as
sqrt(eps). Initial weights: ours follow the width. The paper's, a flat N(0, 0.02^2) from memory, is no gain over
sqrt(fan_in), so there is no preset for it; ``--init nanogpt`` is close, since the norm undoes its factor on the last
projections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spheret.connections.base import Connection, InitRule, Scheme, Stream, tied_embedding_std
from spheret.connections.norms import EPS, NormedEnds, NormKind, build_norm


class PeriLN(Connection):
    """Euclidean residual with a norm on both sides of the sublayer."""

    def __init__(self, dim: int, norm: NormKind = "layernorm", eps: float = EPS) -> None:
        super().__init__()
        self.input_norm = build_norm(norm, dim, eps)
        self.output_norm = build_norm(norm, dim, eps)

    def reset_parameters(self) -> None:
        self.input_norm.reset_parameters()
        self.output_norm.reset_parameters()

    def branch_input(self, h: Tensor) -> Tensor:
        return self.input_norm(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        return h + self._update(h, f)

    def stats(self, h: Tensor, f: Tensor, out: Tensor) -> dict[str, Tensor]:
        """Of the update that is added, ``Norm(f)``: the scale of ``f`` itself means nothing here."""
        with torch.no_grad():
            return super().stats(h, self._update(h, f), out)

    def _update(self, h: Tensor, f: Tensor) -> Tensor:
        return self.output_norm(f.to(h.dtype))


@dataclass(frozen=True, kw_only=True)
class PeriLNScheme(Scheme):
    """Options of ``peri-ln``.

    Attributes:
        norm: layernorm or rmsnorm, for all norms.
        embedding_norm: a norm behind the embedding.
        eps: added to the variance in every norm.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        residual: further factor on the initial last projection of every sublayer.
    """

    name: ClassVar[str] = "peri-ln"
    equation: ClassVar[str] = "h' = h + Norm(F(Norm(h)))"
    placement: ClassVar[str] = "norm in front of F and behind it, behind the embedding and before the head"
    cost: ClassVar[str] = "16 units, 7 forward and 9 backward"
    source: ClassVar[str] = "arXiv 2502.02732"

    norm: NormKind = "layernorm"
    embedding_norm: bool = True
    eps: float = EPS
    gain: float = 1.0
    embedding_gain: float = 1.0
    residual: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ValueError(f"eps = {self.eps}: a norm needs a small number above 0, for example 1e-5")

    def stream(self, dim: int, n_layer: int) -> Stream:
        return NormedEnds(self.norm, dim, entry=self.embedding_norm, eps=self.eps)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return PeriLN(dim, self.norm, self.eps)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        normalised, plain = tied_embedding_std(dim, self.embedding_gain), self.embedding_gain / math.sqrt(dim)
        return InitRule(
            embedding_std=normalised if self.embedding_norm else plain, gain=self.gain, residual_gain=self.residual
        )
