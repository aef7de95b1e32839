r"""Post-LN: a LayerNorm on the sum of stream and update (Vaswani et al. 2017).

    h' = LN(h + b F(h))

Every connection rescales the stream, so the skip path decays with depth. b = 1 is the published form.

The default b = 1/sqrt(2L) is DeepNorm's idea (arXiv 2203.00555: LN(a h + F), a = 1/b) with the exponent 1/2. At every
depth the skip path keeps a share of about e^(-1/2) of the embedding, and the last projections learn slowly enough for
this to last. With b = 1, scaling only the initial last projections by 1/sqrt(2L), 24 layers collapse to the unigram
plateau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream
from spheret.connections.norms import NormedStream, build_norm
from spheret.connections.options import InitRule, tied_embedding_std


class PostLN(Connection):
    """Euclidean residual with a LayerNorm (eps 1e-5) on the sum of ``h`` and ``branch`` times the update."""

    def __init__(self, dim: int, bias: bool = False, branch: float = 1.0) -> None:
        super().__init__()
        self.norm = build_norm("layernorm", dim, bias=bias)
        self.branch = branch

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        return self.norm(h + f if self.branch == 1 else torch.add(h, f, alpha=self.branch))


@dataclass(frozen=True, kw_only=True)
class PostLNScheme(Scheme):
    """Options of ``post-ln``.

    Attributes:
        bias: whether norms have a bias besides their gain.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        branch: the factor b on every update; by default 1/sqrt(2L), in the published form 1.
        residual: further factor on the initial last projection of every sublayer.
    """

    name: ClassVar[str] = "post-ln"
    equation: ClassVar[str] = "h' = LN(h + b F(h)),   b = 1/sqrt(2L)"
    placement: ClassVar[str] = "LayerNorm after the embedding and on every sum"
    cost: ClassVar[str] = (
        "13 units: 5 forward (sum 3, norm 2), 8 backward (sum of the two gradients of h' 3, norm 3, product with b 2)"
    )
    source: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762; b after DeepNorm, arXiv 2203.00555"

    bias: bool = False
    gain: float = 1.0
    embedding_gain: float = 1.0
    branch: float | None = None
    residual: float = 1.0

    def stream(self, dim: int, n_layer: int) -> Stream:
        return NormedStream(dim, entry="layernorm", bias=self.bias)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return PostLN(
            dim, self.bias, 1 / math.sqrt(SUBLAYERS_PER_LAYER * n_layer) if self.branch is None else self.branch
        )

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(
            embedding_std=tied_embedding_std(dim, self.embedding_gain),
            gain=self.gain,
            residual_gain=self.residual,
        )
