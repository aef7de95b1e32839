r"""Keel: Post-LN with a skip path as strong as the model is deep, and a norm before the sublayer (arXiv 2601.19895).

    h' = Norm(a h + F(Norm(h))),   a = 2L

a is the number of sublayers of the model (two in each of L blocks) and is not learned. Each connection divides a
token's own signal by about sqrt(1 + s^2/a^2), where s is the size of F. After all 2L connections a factor of
1 - s^2/(4L) is left; Post-LN (a = 1) leaves 2^(-L) at s = 1 (derived). In the first block, attention is Pre-LN,
``h + F(Norm(h))``, and the MLP has a = 1.

F is about 1/a of the sum. At a = 512 that is below the resolution of bfloat16, so the sum and the outer norm are
float32 at any dtype of the stream. The stream itself should be float32 too, as it is under autocast.

Source of each choice. a = 2L and the equation: second hand (a summary and three ports agree; one note has a = sqrt(2L),
hence the option). The first block: second hand, two ports of three; in the third port, the whole block is Pre-LN
(``first_block=pre-ln``). Final norm, gains that start at 1, fixed a: second hand (the ports). eps: a guess (GPT-2's).

Differences from the ports: LayerNorm instead of RMSNorm, so that a comparison with Pre-LN varies the connection alone.
Initial weights follow width and depth as in Pre-LN: this trains better than last projections that do not shrink with
depth (2.59 against 2.77 nats at 12 layers, d = 64, learning rate 0.8/d). ``preset=paper`` is the ports' choice:
RMSNorm, no scaling with depth, and gains that give all weights the ports' N(0, 0.02^2) at their width of 1024, except
the last projections of MLPs (0.01).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream
from spheret.connections.norms import EPS, Float32Norm, NormedStream, NormKind, build_norm, check_eps
from spheret.connections.options import InitRule
from spheret.geometry import compute_dtype


class Keel(Connection):
    """Scaled Post-LN with an inner norm.

    Args:
        dim: width d.
        alpha: factor a on the skip path; None omits the outer norm, which makes the connection Pre-LN.
        norm: ``layernorm`` or ``rmsnorm``.
        eps: added to the variance in both norms.
    """

    def __init__(self, dim: int, alpha: float | None, norm: NormKind = "layernorm", eps: float = EPS) -> None:
        super().__init__()
        self.alpha = alpha
        self.inner = build_norm(norm, dim, eps=eps)
        self.outer = None if alpha is None else Float32Norm(norm, dim, eps=eps)

    def branch_input(self, h: Tensor) -> Tensor:
        return self.inner(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        if self.outer is None:
            return h + f
        dtype = compute_dtype(h, f)
        # One operation: alpha * h on its own would write another tensor of the size of h.
        return self.outer(torch.add(f.to(dtype), h.to(dtype), alpha=self.alpha))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


@dataclass(frozen=True, kw_only=True)
class KeelScheme(Scheme):
    """Options of ``keel``.

    Attributes:
        norm: layernorm or rmsnorm, for all norms.
        alpha: the factor a on the skip path; by default the number of sublayers, 2L.
        first_block: attention omits the outer norm in the first attention only, pre-ln in the whole first block.
        eps: added to the variance in every norm.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        residual: further factor on the initial last projection of every sublayer; by default 1/sqrt(2L).
    """

    name: ClassVar[str] = "keel"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {"norm": "rmsnorm", "gain": 0.64, "embedding_gain": 0.64, "residual": 1.0},
    }
    equation: ClassVar[str] = """h' = Norm(2L h + F(Norm(h)))
in the first block h' = h + F(Norm(h)), then h' = Norm(h + F(Norm(h)))"""
    placement: ClassVar[str] = "norm before F, on the sum, and before the head"
    cost: ClassVar[str] = (
        "18 units: 7 forward (sum 3, two norms 4), 11 backward (two norms 6, sum of the two gradients of h' 3, "
        "product with 2L 2)"
    )
    source: ClassVar[str] = "arXiv 2601.19895"

    norm: NormKind = "layernorm"
    alpha: float | None = None
    first_block: Literal["attention", "pre-ln"] = "attention"
    eps: float = EPS
    gain: float = 0.57  # Pre-LN's
    embedding_gain: float = 1.0
    residual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)

    def stream(self, dim: int, n_layer: int) -> Stream:
        return NormedStream(dim, final=self.norm, eps=self.eps)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return Keel(dim, self._skip_factor(layer_idx, n_layer, sublayer), self.norm, self.eps)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(
            embedding_std=self.embedding_gain / math.sqrt(dim),
            gain=self.gain,
            residual_gain=1 / math.sqrt(SUBLAYERS_PER_LAYER * n_layer) if self.residual is None else self.residual,
        )

    def _skip_factor(self, layer_idx: int, n_layer: int, sublayer: int) -> float | None:
        if layer_idx == 0:
            return None if sublayer == 0 or self.first_block == "pre-ln" else 1.0
        return float(SUBLAYERS_PER_LAYER * n_layer) if self.alpha is None else self.alpha
