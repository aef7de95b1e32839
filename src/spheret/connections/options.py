"""What a scheme asks of the model around its connections, of its initial weights, and of the run that trains it.

The defaults describe GPT-2's architecture and ask nothing of the run, so a scheme that is only a connection sets
nothing but its initial weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

Positions = Literal["learned", "rope"]
MLPKind = Literal["gelu", "swiglu"]
QKNorm = Literal["none", "l2", "rms"]
Head = Literal["tied", "untied"]


class Scaling(NamedTuple):
    """A learned scale in stored form: ``used = stored * start / scale``, where ``stored`` starts at ``scale``."""

    start: float
    scale: float


ONE = Scaling(1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Constant factors on the outputs of the linear maps; 1 means no factor.

    Attributes:
        qkv: on queries, keys and values.
        attn_out: on the output of the attention.
        up: on the half of the MLP's first map that is gated.
        gate: on the half that goes through the SiLU, before the SiLU.
        down: on the output of the MLP.
    """

    qkv: float = 1.0
    attn_out: float = 1.0
    up: float = 1.0
    gate: float = 1.0
    down: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model around the connections.

    Attributes:
        positions: ``learned`` embeddings added to the tokens' embeddings, or ``rope``, rotations of queries and keys.
        mlp: ``gelu``, d -> 4d -> d, or ``swiglu``, d -> 2 x 4d -> d.
        qk_norm: norm of queries and keys, head by head: ``none``, ``l2`` (unit norm times a learned scale, after the
            rotation) or ``rms`` (RMSNorm with a gain, before the rotation).
        head: ``tied`` to the token embedding, or ``untied``, a matrix of its own.
        unit_heads: queries and keys have norm 1 instead of sqrt(d_h) although ``qk_norm`` is none; the softmax then
            takes ``sqrt(d_h) <q, k>`` instead of ``<q, k> / sqrt(d_h)``.
        qk_scale: the learned scale of the ``l2`` norm, one entry per dimension of all heads.
        mlp_scale: learned scale on both halves of the gated MLP, one entry per hidden unit; None: no scale.
        logit_scale: learned scale on the logits, one entry per token of the vocabulary; None: no scale.
        factors: constants on the outputs of the linear maps.
        fixed: names of the choices above that a model must not override.
    """

    positions: Positions = "learned"
    mlp: MLPKind = "gelu"
    qk_norm: QKNorm = "none"
    head: Head = "tied"
    unit_heads: bool = False
    qk_scale: Scaling = ONE
    mlp_scale: Scaling | None = None
    logit_scale: Scaling | None = None
    factors: Factors = Factors()
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class InitRule:
    """Initial scale of a model's weights.

    Attributes:
        embedding_std: standard deviation of token and position embeddings.
        gain: hidden weights are N(0, (gain / sqrt(fan_in))^2), so a sublayer's response does not depend on the width.
        residual_gain: further factor on the last projection of every sublayer.
    """

    embedding_std: float
    gain: float = 1.0
    residual_gain: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < math.inf:
                raise ValueError(f"{f.name} = {getattr(self, f.name)}: an initial scale is a finite number, 0 or more")


def tied_embedding_std(dim: int, gain: float = 1.0) -> float:
    """Initial standard deviation of embeddings that are also the head: ``8 gain / d``, at most ``gain / sqrt(d)``.

    For streams that are normalised after the embedding. At initialisation such a stream still holds much of its
    token's embedding, so a tied head answers each token with itself, by a logit of about ``std * d`` times that
    overlap. With 1/sqrt(d) this logit grows as sqrt(d): at d = 512 the loss starts at 7.9 instead of 5.5, and the
    states of all tokens collapse onto each other before anything is learned. A learning rate proportional to 1/d moves
    weights of size 8/d by the same share at every width. 2/d is too small: the same learning rate moves such weights
    too fast, and the model collapses as well.
    """
    return gain * min(8 / dim, dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class TrainingDefaults:
    """Settings of a run that belong to the method.

    Attributes:
        weight_decay: decoupled weight decay; None: the method does not say.
        warmup: linear warm-up, below 1 a share of all steps, otherwise a number of steps; None: the method does not
            say.
        lr_factor: factor on the learning rates that are tried when none are given.
    """

    weight_decay: float | None = None
    warmup: float | None = None
    lr_factor: float = 1.0
