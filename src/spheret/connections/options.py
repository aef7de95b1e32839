"""What a scheme that is a whole model asks of the model around its connections, and of the run that trains it.

The defaults describe GPT-2's architecture and ask nothing of the run, so that a scheme which is only a connection has
nothing to say here.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Constant factors on the outputs of the linear maps, 1 where there is none.

    Attributes:
        qkv: on queries, keys and values.
        attn_out: on the output of the attention.
        up: on the half of the MLP's first map that is gated.
        gate: on the half that goes through the SiLU, in front of it.
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
        positions: ``learned`` embeddings added to the tokens' or ``rope``, rotations of queries and keys.
        mlp: ``gelu``, d -> 4d -> d, or ``swiglu``, d -> 2 x 4d -> d.
        qk_norm: of queries and keys, head by head: ``none``, ``l2`` (unit norm times a learned scale, behind the
            rotation), ``rms`` (RMSNorm with a gain, in front of it).
        head: ``tied`` to the token embedding, or a matrix of its own.
        unit_heads: queries and keys have norm 1, not sqrt(d_h), where ``qk_norm`` is none; the softmax then takes
            ``sqrt(d_h) <q, k>`` instead of ``<q, k> / sqrt(d_h)``.
        qk_scale: of the ``l2`` norm, one entry per dimension of all heads.
        mlp_scale: on both halves of the gated MLP, one entry per hidden unit; None: none.
        logit_scale: on the logits, one entry per token of the vocabulary; None: none.
        factors: on the outputs of the linear maps.
        fixed: names of the choices above that a model may not override.
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


@dataclass(frozen=True, kw_only=True)
class TrainingDefaults:
    """Settings of a run that belong to the method; None where any will do.

    Attributes:
        weight_decay: decoupled weight decay.
        warmup: linear warm-up, below 1 a share of all steps, otherwise a number of steps.
        lr_factor: on the learning rates that are tried where none are given.
    """

    weight_decay: float | None = None
    warmup: float | None = None
    lr_factor: float = 1.0
