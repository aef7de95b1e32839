r"""anGPT: ``h' = nu(alpha) (h + alpha (F(h) - h))``, constants in place of norms (arXiv 2505.22014). With ``nu(alpha) =
1/sqrt(alpha^2 + (1 - alpha)^2)`` and a constant factor on every map, all states stay near norm 1.

    q, k, v = nu_qkv W h,  nu_qkv = sqrt(d/d_h)     attention out = nu_p W_p y,  nu_p = sqrt(d_h/d)
    u, z = nu_uz W_uz h,  nu_uz = sqrt(d/4d)        MLP = nu_d W_d (nu_acf u silu(sqrt(d) z)),  nu_d = sqrt(4d/d)
    nu_acf = 1/sqrt(E[silu(N(0, 1/4))^2]) = 3.72    logits = s_z (W_head h)

From the authors' abstract: scalar multiplications in place of norms, norms of the parameters constrained and not
fixed, no weight decay, no warm-up. Second hand (notes on the paper): all formulas above except the sqrt(d) of the gate,
rows with |w| <= 1, initial weights normalised, SwiGLU, RoPE and QK normalisation, alpha and s_z in stored-scale form,
a start of .01 for alpha. Derived: sqrt(d) in the gate, the only scale that gives the reported nu_acf (3.74 there); rows
are output neurons, which nu_d = 2 requires. nu(alpha) assumes <F, h> = 0.
Guesses, each an option: alpha is a vector of width d (``alpha_shape``); one nu per connection, from the mean of
alpha^2 + (1 - alpha)^2 (``nu``; ``none`` is the paper's unstable ablation); alpha may be negative (``positive``); the
stored scales are 1/sqrt(d) and s_z starts at 1, both as in nGPT; QK normalisation is an RMSNorm with gains as in GPT+
(``qk_norm``); the head is untied. Guesses without an option: rows are bounded after every optimizer step, and the
attention's average over tokens has no factor, which the notes call an open problem.
Nothing bounds a hidden state whose update is aligned with it, and the MLP's response grows as |h|^2: with a learning
rate above about 5/(d layers), hidden states diverge in the first steps of a run. Warm-up prevents this (our own
measurement, docs/log.md).

Parameters: one vector alpha of width d per connection, one vector over the vocabulary, gains of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from spheret.connections.base import Connection, Scheme, Stream
from spheret.connections.learned import ScaledVector, scaling
from spheret.connections.options import Factors, InitRule, ModelOptions, Scaling, TrainingDefaults
from spheret.connections.weights import bound, matrices, normalise
from spheret.geometry import compute_dtype

HIDDEN = 4  # hidden units of the MLP, in units of d


@cache
def gated_silu_factor(variance: float) -> float:
    """``1/sqrt(E[silu(z)^2])`` for z ~ N(0, variance), by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(96)
    # hermegauss integrates against exp(-x^2/2): dividing by sqrt(2 pi) makes that the standard normal density. 96 nodes
    # give more digits than float32 holds.
    z = math.sqrt(variance) * nodes
    mean = (weights * (z / (1 + np.exp(-z))) ** 2).sum() / math.sqrt(2 * math.pi)
    return float(mean**-0.5)


def norm_factors(dim: int, head_dim: int) -> Factors:
    """The constants that give every linear map with unit-norm rows an output of norm about 1 for an input of norm 1."""
    halves = math.sqrt(1 / HIDDEN)
    return Factors(
        qkv=math.sqrt(dim / head_dim),
        attn_out=math.sqrt(head_dim / dim),
        up=halves * gated_silu_factor(1 / HIDDEN),
        gate=halves * math.sqrt(dim),
        down=math.sqrt(HIDDEN),
    )


class ApproximateStep(Connection):
    """``h' = nu (h + alpha (f - h))``.

    ``nu`` is computed from the ``mean`` over alpha's entries, ``entry`` by entry, or is 1 (``none``).
    """

    def __init__(self, dim: int, alpha: Scaling, nu: str = "mean", *, positive: bool = False) -> None:
        super().__init__()
        self.alpha, self.nu = ScaledVector(dim, alpha, positive=positive), nu

    def norm_factor(self, alpha: Tensor) -> Tensor | float:
        """nu(alpha), of shape (1,), or (d,) entry by entry."""
        if self.nu == "none":
            return 1.0
        square = alpha.square() + (1 - alpha).square()
        return torch.rsqrt(square.mean(-1, keepdim=True) if self.nu == "mean" else square)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        alpha, dtype = self.alpha(), compute_dtype(h, f)
        nu = self.norm_factor(alpha)
        return nu * (1 - alpha) * h.to(dtype) + nu * alpha * f.to(dtype)


class BoundedRows(Stream):
    """The rows of all weight matrices start at norm 1; after every optimizer step their norms are bounded by 1."""

    def after_init(self, model: nn.Module) -> None:
        for weight, _ in matrices(model):
            normalise(weight, axis=1)

    def after_step(self, model: nn.Module) -> None:
        for weight, _ in matrices(model):
            bound(weight, axis=1)


@dataclass(frozen=True, kw_only=True)
class ANGPTScheme(Scheme):
    """Options of ``angpt``.

    Attributes:
        alpha: initial value of alpha.
        alpha_scale: the number stored for alpha at the start; by default 1/sqrt(d).
        alpha_shape: one alpha for every entry (vector) or for the connection (scalar).
        nu: the factor nu(alpha) from the mean over entries, entry by entry, or none.
        positive: use the absolute value of alpha, as in nGPT.
        logits: initial value of s_z.
        logits_scale: the number stored for s_z at the start; by default 1/sqrt(d).
        qk_norm: rms, l2 with a learned scale as in nGPT, or none.
        head: untied, or tied to the token embedding.
    """

    name: ClassVar[str] = "angpt"
    equation: ClassVar[str] = "h' = nu (h + alpha (F(h) - h)),   nu = 1/sqrt(alpha^2 + (1 - alpha)^2)"
    placement: ClassVar[str] = "constants on the outputs of all linear maps; queries and keys normalised; no other norm"
    source: ClassVar[str] = "arXiv 2505.22014 (abstract read; formulas second hand)"
    cost: ClassVar[str] = (
        "22 units: 7 forward (two products 4, sum 3), 15 backward (sum of the two gradients of h' 3, two products 4, "
        "the gradient of alpha 8)"
    )

    alpha: float = 0.01
    alpha_scale: float | None = None
    alpha_shape: Literal["vector", "scalar"] = "vector"
    nu: Literal["mean", "entry", "none"] = "mean"
    positive: bool = False
    logits: float = 1.0
    logits_scale: float | None = None
    qk_norm: Literal["rms", "l2", "none"] = "rms"
    head: Literal["untied", "tied"] = "untied"

    def stream(self, dim: int, n_layer: int) -> Stream:
        return BoundedRows()

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        alpha = scaling(self.alpha, self.alpha_scale, dim)
        width = dim if self.alpha_shape == "vector" else 1
        return ApproximateStep(width, alpha, self.nu, positive=self.positive)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(embedding_std=1 / math.sqrt(dim))

    def model_options(self, dim: int, head_dim: int) -> ModelOptions:
        return ModelOptions(
            positions="rope",
            mlp="swiglu",
            qk_norm=self.qk_norm,
            head=self.head,
            unit_heads=True,
            qk_scale=scaling(1.0, None, dim),
            logit_scale=scaling(self.logits, self.logits_scale, dim),
            factors=norm_factors(dim, head_dim),
            fixed=frozenset({"mlp", "positions"}),
        )

    def training(self, n_layer: int) -> TrainingDefaults:
        # The first updates are aligned, so they add up over the layers, and no norm brings the hidden state back. The
        # learning rate that stays stable therefore falls with depth.
        return TrainingDefaults(weight_decay=0.0, warmup=0.0, lr_factor=min(2.0, 6 / n_layer), qkv_lr=0.0)
