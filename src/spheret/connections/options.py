"""A scheme's requirements on the model around its connections, on its initial weights, and on the run that trains it.

The defaults describe GPT-2's architecture and leave the run as it is. A scheme that is only a connection therefore sets
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
        up: on the half of the MLP's first projection that is gated.
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
        positions: ``learned`` position embeddings added to the token embeddings, or ``rope``, rotations of queries and
            keys.
        mlp: ``gelu``, d -> 4d -> d, or ``swiglu``, d -> 2 x 4d -> d.
        qk_norm: norm of queries and keys, head by head: ``none``, ``l2`` (unit norm times a learned scale, after the
            rotation) or ``rms`` (RMSNorm with a gain, before the rotation).
        head: ``tied`` to the token embedding, or ``untied``, a separate matrix.
        unit_heads: queries and keys have norm about 1 instead of sqrt(d_h) even if ``qk_norm`` is none; the softmax
            scale is then ``sqrt(d_h)`` instead of ``1 / sqrt(d_h)``.
        qk_scale: the learned scale of the ``l2`` norm, one entry per dimension of all heads.
        mlp_scale: learned scale on both halves of the gated MLP, one entry per hidden unit; None: no scale.
        logit_scale: learned scale on the logits, one entry per token of the vocabulary; None: no scale.
        factors: constant factors on the outputs of the linear maps.
        fixed: names of the options above that a model configuration must not override.
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

    For streams that are normalised after the embedding. At initialisation such a stream still contains much of the
    token's embedding, so a tied head predicts each token itself, with a logit of about ``std * d`` times that overlap.
    With a std of 1/sqrt(d) this logit grows as sqrt(d): at d = 512 the loss starts at 7.9 instead of 5.5 nats, and the
    states of all tokens collapse onto each other before the model learns anything. With a std of 8/d, a learning rate
    proportional to 1/d moves the weights by the same share at every width. 2/d is too small: the same learning rate
    moves such weights too fast, and the model collapses as well.
    """
    # Up to d = 64, 8/d is the larger of the two, and 1/sqrt(d) is used.
    return gain * min(8 / dim, dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class TrainingDefaults:
    """Training settings that belong to the scheme: the published ones, and ours where there are none.

    Attributes:
        weight_decay: decoupled weight decay; None: not specified by the method.
        warmup: linear warm-up, below 1 a share of all steps, otherwise a number of steps; None: not specified by the
            method.
        lr_factor: factor on the default learning rates, used when the user gives none.
        qkv_lr: largest learning rate of the projections to queries, keys and values, in units of 1/width; 0: no bound.
            Adam moves queries and keys together, and the attention scores are their product, so at one common rate they
            limit every scheme's range of learning rates. Their best rate hardly changes with that of the others
            (docs/log-training.md).
        mlp_out_lr: the same for the MLPs' last projections, which sum over 4d inputs.
    """

    weight_decay: float | None = None
    warmup: float | None = None
    lr_factor: float = 1.0
    qkv_lr: float = 0.2
    mlp_out_lr: float = 0.0
