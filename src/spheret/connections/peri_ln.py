r"""Peri-LN: a norm before every sublayer and one after it (arXiv 2502.02732).

    h' = h + Norm(F(Norm(h)))

The residual path itself is not normalised; the embedding and the input of the head are. At initialisation every update
has root mean square 1, whatever the scale of F, so the variance of ``h`` grows linearly with depth: |h_n| = sqrt(1 + n)
|h_0| after n sublayers. The usual factor 1/sqrt(2L) on the last projection of a sublayer would leave the output
unchanged but multiply that projection's gradient by sqrt(2L), so the factor is 1 here.

Source of each choice. The equation, norms after the embedding and before the head, gains that start at 1: second hand
(notes on the paper); the norm after the embedding being optional: from memory. LayerNorm or RMSNorm: the paper. The
growth with depth: second hand, and derived. eps: a guess (GPT-2's); it matters where F is as small as sqrt(eps).
Initial weights: here they follow the width. The paper's are N(0, 0.02^2) at every width (from memory), which no preset
selects; ``--init nanogpt`` is close, since the norm cancels its factor on the last projections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spheret.connections.base import Connection, Scheme, Stream
from spheret.connections.norms import EPS, NormedStream, NormKind, build_norm, check_eps
from spheret.connections.options import InitRule, tied_embedding_std


class PeriLN(Connection):
    """Euclidean residual with a norm on both sides of the sublayer."""

    def __init__(self, dim: int, norm: NormKind = "layernorm", eps: float = EPS) -> None:
        super().__init__()
        self.input_norm = build_norm(norm, dim, eps=eps)
        self.output_norm = build_norm(norm, dim, eps=eps)

    def branch_input(self, h: Tensor) -> Tensor:
        return self.input_norm(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        return h + self._update(h, f)

    def stats(self, h: Tensor, f: Tensor, out: Tensor) -> dict[str, Tensor]:
        """Statistics of the update that is added, ``Norm(f)``: the scale of ``f`` has no effect on h'."""
        with torch.no_grad():
            return super().stats(h, self._update(h, f), out)

    def _update(self, h: Tensor, f: Tensor) -> Tensor:
        # Under autocast f is bfloat16: cast before the norm, so that the update is as precise as the stream.
        return self.output_norm(f.to(h.dtype))


@dataclass(frozen=True, kw_only=True)
class PeriLNScheme(Scheme):
    """Options of ``peri-ln``.

    Attributes:
        norm: layernorm or rmsnorm, for all norms.
        embedding_norm: whether there is a norm after the embedding.
        eps: added to the variance in every norm.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        residual: further factor on the initial last projection of every sublayer.
    """

    name: ClassVar[str] = "peri-ln"
    equation: ClassVar[str] = "h' = h + Norm(F(Norm(h)))"
    placement: ClassVar[str] = "norm before and after F, after the embedding, and before the head"
    cost: ClassVar[str] = (
        "16 units: 7 forward (two norms 4, sum 3), 9 backward (two norms 6, sum of the two gradients of h' 3)"
    )
    source: ClassVar[str] = "arXiv 2502.02732"

    norm: NormKind = "layernorm"
    embedding_norm: bool = True
    eps: float = EPS
    gain: float = 1.0
    embedding_gain: float = 1.0
    residual: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)

    def stream(self, dim: int, n_layer: int) -> Stream:
        return NormedStream(dim, entry=self.norm if self.embedding_norm else "none", final=self.norm, eps=self.eps)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return PeriLN(dim, self.norm, self.eps)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        # With a normalised embedding a tied head needs smaller embeddings; see tied_embedding_std.
        normalised = tied_embedding_std(dim, self.embedding_gain)
        return InitRule(
            embedding_std=normalised if self.embedding_norm else self.embedding_gain / math.sqrt(dim),
            gain=self.gain,
            residual_gain=self.residual,
        )
