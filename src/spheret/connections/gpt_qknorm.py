r"""GPT+: ``h' = h + F(RMS(h))`` with SwiGLU, RoPE, QK normalisation (baseline of arXiv 2505.22014). RMSNorm before
every sublayer, before an untied head, and on queries and keys.

    RMS(x) = g x / sqrt(mean(x^2) + eps),   F: attention with RMS(q), RMS(k) head by head, or W_d (u silu(v))

Source of each choice. SwiGLU, RoPE, RMSNorm before the sublayers, QK normalisation, AdamW with weight decay and
warm-up: second hand (notes on arXiv 2505.22014). eps = 1e-6, a hidden width of 4d, an untied head: nGPT's baseline
(from its code, github.com/NVIDIA/ngpt). QK normalisation by an RMSNorm with one gain of width d_h for all heads, before
the rotation: as in Qwen3 (from the code of transformers); which form arXiv 2505.22014 uses is a guess. Initial weights:
a guess, the same as for Pre-LN.

Parameters: one gain of width d per connection, two of width d_h per attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream
from spheret.connections.learned import scaling
from spheret.connections.norms import RMS_EPS, NormedStream, RMSNorm
from spheret.connections.options import InitRule, ModelOptions, TrainingDefaults


class PreRMS(Connection):
    """Euclidean residual with an RMSNorm (eps 1e-6) before the sublayer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)

    def branch_input(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        return h + f


@dataclass(frozen=True, kw_only=True)
class GPTQKNormScheme(Scheme):
    """Options of ``gpt-qknorm``.

    Attributes:
        qk_norm: rms with a gain, or l2 with a learned scale as in nGPT.
        head: untied, or tied to the token embedding.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        residual: further factor on the initial last projection of every sublayer; by default 1/sqrt(2L).
    """

    name: ClassVar[str] = "gpt-qknorm"
    equation: ClassVar[str] = "h' = h + F(RMS(h))"
    placement: ClassVar[str] = "RMSNorm before every sublayer and before the head; queries and keys normalised"
    source: ClassVar[str] = "baseline GPT+ of arXiv 2505.22014; QK normalisation: arXiv 2010.04245"
    cost: ClassVar[str] = (
        "11 units: 5 forward (sum 3, norm 2), 6 backward (norm 3, sum of the two gradients of h' 3); about 37 where "
        "PyTorch has no fused RMSNorm and runs it as several operations"
    )

    qk_norm: Literal["rms", "l2"] = "rms"
    head: Literal["untied", "tied"] = "untied"
    gain: float = 0.57
    embedding_gain: float = 1.0
    residual: float | None = None

    def stream(self, dim: int, n_layer: int) -> Stream:
        return NormedStream(dim, final="rmsnorm", eps=RMS_EPS)

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return PreRMS(dim)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(
            embedding_std=self.embedding_gain / math.sqrt(dim),
            gain=self.gain,
            residual_gain=1 / math.sqrt(SUBLAYERS_PER_LAYER * n_layer) if self.residual is None else self.residual,
        )

    def model_options(self, dim: int, head_dim: int) -> ModelOptions:
        return ModelOptions(
            positions="rope",
            mlp="swiglu",
            qk_norm=self.qk_norm,
            head=self.head,
            qk_scale=scaling(1.0, None, dim),
        )

    def training(self, n_layer: int) -> TrainingDefaults:
        return TrainingDefaults(lr_factor=0.5, qkv_lr=0.0)
