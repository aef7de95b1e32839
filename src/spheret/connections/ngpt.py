r"""nGPT: ``h' = Norm(h + alpha (Norm(F(h)) - h))``, all vectors of norm 1 (arXiv 2410.01131). With ``Norm(x) =
x/|x|``; weight matrices have norm 1 along the embedding axis.

    alpha = |stored .05/scale| (d,), scale = 1/sqrt(d)        q, k <- s_qk Norm(q), s_qk Norm(k), softmax(sqrt(d_h) qk)
    u, v = sqrt(d) s_uv (W_fc h),  F = W_proj (u silu(v))     logits = s_z (W_head h)

From the authors' code (github.com/NVIDIA/ngpt): all of the above; s_qk (d,) and s_z (vocabulary,) start at 1 and are
stored as 1/sqrt(d), s_uv (2 x 4d,) starts at 1 and is stored as 1; rotary positions before the norm; no other norm, an
untied head; rows of the embedding, the head, W_q, W_k, W_v and W_fc and columns of both W_proj are normalised once
and after every optimizer step; weight decay 0, warm-up 0.
Differences from the code: ``mlp_scale=paper`` multiplies only v by sqrt(d), as the paper's text and lucidrains' port
do. The code's rotary positions are not a rotation; here they are. The code divides h by its norm before every
connection; here |h| = 1 from the start, since the embedding is normalised on entry (derived). ``weights=bounded``,
norms of at most 1, is an ablation of arXiv 2505.22014 (second hand).

Parameters: one vector alpha of width d per connection, 1 + 8 vectors of width d per block, one over the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from spheret.connections.base import Connection, Scheme, Stream
from spheret.connections.learned import ScaledVector, scaling
from spheret.connections.options import Factors, InitRule, ModelOptions, Scaling, TrainingDefaults
from spheret.connections.weights import bound, matrices, normalise
from spheret.geometry import compute_dtype
from spheret.kernels import unit


class NormalisedStep(Connection):
    """A step from ``h`` towards the normalised update, with rates ``alpha`` (d,), projected onto the unit sphere."""

    def __init__(self, dim: int, alpha: Scaling) -> None:
        super().__init__()
        self.alpha = ScaledVector(dim, alpha, positive=True)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        x = h.to(compute_dtype(h, f))
        return unit(x + self.alpha() * (unit(f) - x))


class UnitSphere(Stream):
    """Hidden states and weight vectors of norm 1. With ``bounded``, training may shorten the weight vectors."""

    def __init__(self, bounded: bool = False) -> None:
        super().__init__()
        self.bounded = bounded

    def enter(self, h: Tensor) -> Tensor:
        return unit(h).to(h.dtype)

    def after_init(self, model: nn.Module) -> None:
        for weight, axis in matrices(model):
            normalise(weight, axis)

    def after_step(self, model: nn.Module) -> None:
        for weight, axis in matrices(model):
            (bound if self.bounded else normalise)(weight, axis)


@dataclass(frozen=True, kw_only=True)
class NGPTScheme(Scheme):
    """Options of ``ngpt``.

    Attributes:
        alpha: initial value of the eigen learning rates alpha.
        alpha_scale: the number stored for alpha at the start; by default 1/sqrt(d).
        qk: initial value of s_qk.
        qk_scale: the number stored for s_qk at the start; by default 1/sqrt(d).
        uv: initial value of s_u and s_v.
        uv_scale: the number stored for s_u and s_v at the start.
        logits: initial value of s_z.
        logits_scale: the number stored for s_z at the start; by default 1/sqrt(d).
        mlp_scale: code multiplies u and v by sqrt(d), as the authors' code does; paper multiplies only v.
        weights: unit normalises the weight vectors after every step, bounded keeps their norms at 1 or below.
        head: untied, or tied to the token embedding.
    """

    name: ClassVar[str] = "ngpt"
    keeps_norm: ClassVar[bool] = True
    equation: ClassVar[str] = "h' = Norm(h + alpha (Norm(F(h)) - h)), Norm(x) = x/|x|"
    placement: ClassVar[str] = "states, queries, keys and all weight vectors on the unit sphere; no other norm"
    source: ClassVar[str] = "arXiv 2410.01131, github.com/NVIDIA/ngpt"
    cost: ClassVar[str] = (
        "46 units: 14 forward (two norms 6, difference 3, product 2, sum 3), 32 backward (two norms 18, product and "
        "the gradient of alpha 6, difference 2, sums of gradients 6)"
    )

    alpha: float = 0.05
    alpha_scale: float | None = None
    qk: float = 1.0
    qk_scale: float | None = None
    uv: float = 1.0
    uv_scale: float = 1.0
    logits: float = 1.0
    logits_scale: float | None = None
    mlp_scale: Literal["code", "paper"] = "code"
    weights: Literal["unit", "bounded"] = "unit"
    head: Literal["untied", "tied"] = "untied"

    def stream(self, dim: int, n_layer: int) -> Stream:
        return UnitSphere(bounded=self.weights == "bounded")

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        return NormalisedStep(dim, scaling(self.alpha, self.alpha_scale, dim))

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        # after_init normalises every weight vector, so only the directions of the initial weights matter.
        return InitRule(embedding_std=1 / math.sqrt(dim))

    def model_options(self, dim: int, head_dim: int) -> ModelOptions:
        return ModelOptions(
            positions="rope",
            mlp="swiglu",
            qk_norm="l2",
            head=self.head,
            qk_scale=scaling(self.qk, self.qk_scale, dim),
            mlp_scale=Scaling(self.uv, self.uv_scale),
            logit_scale=scaling(self.logits, self.logits_scale, dim),
            factors=Factors(up=math.sqrt(dim) if self.mlp_scale == "code" else 1.0, gate=math.sqrt(dim)),
            fixed=frozenset({"mlp", "qk_norm"}),
        )

    def training(self, n_layer: int) -> TrainingDefaults:
        return TrainingDefaults(weight_decay=0.0, warmup=0.0, lr_factor=3.0, qkv_lr=0.0)
