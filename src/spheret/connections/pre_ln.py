r"""Pre-LN: a LayerNorm before every sublayer and one before the head (GPT-2, nanoGPT).

    h' = h + F(LN(h))

The norm of ``h`` grows with depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream
from spheret.connections.norms import NormedStream, OptionalNormKind, build_norm, check_bias
from spheret.connections.options import InitRule


class PreLN(Connection):
    """Euclidean residual with a norm (eps 1e-5) before the sublayer."""

    def __init__(self, dim: int, bias: bool = False, branch: float = 1.0, norm: OptionalNormKind = "layernorm") -> None:
        super().__init__()
        self.norm = build_norm(norm, dim, bias=bias)
        self.branch = branch

    def branch_input(self, h: Tensor) -> Tensor:
        return h if self.norm is None else self.norm(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        # torch.add scales and adds in one operation.
        return h + f if self.branch == 1 else torch.add(h, f, alpha=self.branch)


@dataclass(frozen=True, kw_only=True)
class PreLNScheme(Scheme):
    """Options of ``pre-ln``.

    Attributes:
        norm: layernorm or rmsnorm, for all norms; none is a bare addition, a lower bound on the cost of a connection.
        bias: whether norms have a bias besides their gain (layernorm only).
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        branch: constant factor on every update, a number, or inv-sqrt: 1/sqrt(2L).
        residual: further factor on the initial last projection of every sublayer; by default 1/sqrt(2L), and 1 with
            branch=inv-sqrt, so that the updates start at the same size either way.
    """

    name: ClassVar[str] = "pre-ln"
    equation: ClassVar[str] = "h' = h + F(LN(h))"
    placement: ClassVar[str] = "LayerNorm before F and before the head"
    cost: ClassVar[str] = "11 units: 5 forward (sum 3, norm 2), 6 backward (norm 3, sum of the two gradients of h' 3)"
    source: ClassVar[str] = "GPT-2; nanoGPT (github.com/karpathy/nanoGPT)"

    norm: OptionalNormKind = "layernorm"
    bias: bool = False
    gain: float = 0.57
    embedding_gain: float = 1.0
    branch: float | Literal["inv-sqrt"] = 1.0
    residual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bias(self.norm, self.bias)

    def stream(self, dim: int, n_layer: int) -> Stream:
        return NormedStream(dim, final=self.norm, bias=self.bias)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        branch = _inv_sqrt(n_layer) if self.branch == "inv-sqrt" else self.branch
        return PreLN(dim, self.bias, branch, self.norm)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        residual = self.residual
        if residual is None:
            residual = 1.0 if self.branch == "inv-sqrt" else _inv_sqrt(n_layer)
        return InitRule(embedding_std=self.embedding_gain / math.sqrt(dim), gain=self.gain, residual_gain=residual)


def _inv_sqrt(n_layer: int) -> float:
    return 1 / math.sqrt(SUBLAYERS_PER_LAYER * n_layer)
