r"""Pre-DyT: a saturating function of every entry before the sublayer, no norm anywhere (arXiv 2503.10622).

    h' = h + F(DyT(h)),   DyT(x) = gamma tanh(alpha x) (+ beta)

There is a DyT before the head as well. A DyT keeps small entries small: an embedding of size 0.03, as in GPT-2, would
reach the first sublayers as 0.015. The embedding is therefore multiplied by a learned scalar that starts at sqrt(d), as
in the authors' LLaMA models. With embeddings of size 1/sqrt(d), the stream starts at root mean square 1 and the output
of its DyT at 0.4. Without the scalar, two layers of d = 64 stay on the unigram plateau at two of three learning rates
(3.13 and 3.22 nats against 2.72 and 2.61).

Source of each choice. DyT, gamma = 1, beta = 0 and alpha = 0.5 at the start: the authors' code. No beta, separate
starts of alpha for attention, MLP and head, their values from d = 4096 on, the scale on the embedding: the authors'
LLaMA code, where MLP and head start alike. Below d = 4096, alpha = 0.5 is the code's default. A start of 1, which the
paper's table over widths gives (from memory), was worse when measured (2.95 against 2.68 nats at 12 layers, d = 64;
3.08 against 2.86 at 2 layers, d = 512). Initial weights: a guess, 1/sqrt(fan_in). ``preset=paper`` is the paper's text
applied to GPT-2: beta, alpha = 0.5 everywhere, no scale on the embedding. ``--init nanogpt`` gives weights of 0.02 at
every width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from spheret.connections.base import SUBLAYERS_PER_LAYER, Connection, Scheme, Stream
from spheret.connections.learned import LearnedScalar
from spheret.connections.options import InitRule
from spheret.connections.weights import ParameterRole

CODE_ALPHA = 0.5
# Largest width -> start of alpha before attention, and before the MLP and the head. The last three entries are the
# authors' LLaMA models of 7B, 13B, and both 34B and 70B parameters.
ALPHA_BY_WIDTH = {2048: (CODE_ALPHA, CODE_ALPHA), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}


def default_alpha(dim: int) -> tuple[float, float]:
    """The start of alpha before attention, and before the MLP and the head, in a model of width ``dim``."""
    return next((pair for width, pair in ALPHA_BY_WIDTH.items() if dim <= width), ALPHA_BY_WIDTH[8192])


class DyT(nn.Module):
    """``gamma tanh(alpha x) + beta``, (..., d) -> (..., d) in the dtype of x; alpha a scalar, gamma and beta (d,)."""

    def __init__(self, dim: int, alpha: float = CODE_ALPHA, beta: bool = False) -> None:
        super().__init__()
        self.alpha = LearnedScalar(alpha)
        self.gamma = nn.Parameter(torch.empty(dim))
        self.beta = nn.Parameter(torch.empty(dim)) if beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.alpha.reset_parameters()
        nn.init.ones_(self.gamma)
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"gamma": ParameterRole(decay=False), "beta": ParameterRole(decay=False)}

    def forward(self, x: Tensor) -> Tensor:
        bent = self.gamma * torch.tanh(self.alpha() * x)  # float32, because alpha is
        return (bent if self.beta is None else bent + self.beta).to(x.dtype)


class PreDyT(Connection):
    """Euclidean residual with a DyT before the sublayer."""

    def __init__(self, dim: int, alpha: float = CODE_ALPHA, beta: bool = False) -> None:
        super().__init__()
        self.dyt = DyT(dim, alpha, beta)

    def branch_input(self, h: Tensor) -> Tensor:
        return self.dyt(h)

    def combine(self, h: Tensor, f: Tensor) -> Tensor:
        return h + f


class ScaledEntry(Stream):
    """An optional learned factor on the embedding, and a DyT before the head."""

    def __init__(self, dim: int, *, scale: float | None, alpha: float, beta: bool = False) -> None:
        super().__init__()
        self.scale = None if scale is None else LearnedScalar(scale)
        self.dyt = DyT(dim, alpha, beta)

    def enter(self, h: Tensor) -> Tensor:
        return h if self.scale is None else (self.scale() * h).to(h.dtype)

    def exit(self, h: Tensor, entry: Tensor | None = None) -> Tensor:
        return self.dyt(h)


@dataclass(frozen=True, kw_only=True)
class PreDyTScheme(Scheme):
    """Options of ``pre-dyt``.

    Attributes:
        attention_alpha: start of alpha before attention; by default it follows the width.
        mlp_alpha: start of alpha before the MLP; by default it follows the width.
        final_alpha: start of alpha before the head; by default it follows the width.
        beta: whether every DyT has a learned offset.
        embed_scale: sqrt-d multiplies the embedding by a learned scalar that starts at sqrt(d); none omits the scalar.
        gain: initial hidden weights are N(0, (gain / sqrt(fan_in))^2).
        embedding_gain: factor on the initial embeddings.
        residual: further factor on the initial last projection of every sublayer; by default 1/sqrt(2L).
    """

    name: ClassVar[str] = "pre-dyt"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {
            "attention_alpha": CODE_ALPHA,
            "mlp_alpha": CODE_ALPHA,
            "final_alpha": CODE_ALPHA,
            "beta": True,
            "embed_scale": "none",
        },
    }
    equation: ClassVar[str] = "h' = h + F(DyT(h)),   DyT(x) = gamma tanh(alpha x)"
    placement: ClassVar[str] = "no norm; DyT before F and before the head, a learned scale on the embedding"
    cost: ClassVar[str] = (
        "27 units: 9 forward (sum 3, two products 4, tanh 2), 18 backward (sum of the two gradients of h' 3, two "
        "products 4, tanh 3, the gradients of alpha and gamma 8)"
    )
    source: ClassVar[str] = "arXiv 2503.10622"

    attention_alpha: float | None = None
    mlp_alpha: float | None = None
    final_alpha: float | None = None
    beta: bool = False
    embed_scale: Literal["sqrt-d", "none"] = "sqrt-d"
    gain: float = 1.0
    embedding_gain: float = 1.0
    residual: float | None = None

    def stream(self, dim: int, n_layer: int) -> Stream:
        return ScaledEntry(
            dim,
            scale=math.sqrt(dim) if self.embed_scale == "sqrt-d" else None,
            alpha=default_alpha(dim)[1] if self.final_alpha is None else self.final_alpha,
            beta=self.beta,
        )

    def connection(
        self, dim: int, *, layer_idx: int, n_layer: int, sublayer: int = 0, stream: Stream | None = None
    ) -> Connection:
        given = (self.attention_alpha, self.mlp_alpha)[sublayer]
        return PreDyT(dim, default_alpha(dim)[sublayer] if given is None else given, self.beta)

    def init_rule(self, dim: int, n_layer: int) -> InitRule:
        return InitRule(
            embedding_std=self.embedding_gain / math.sqrt(dim),
            gain=self.gain,
            residual_gain=1 / math.sqrt(SUBLAYERS_PER_LAYER * n_layer) if self.residual is None else self.residual,
        )
