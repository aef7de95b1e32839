r"""Gated p-SpheretNorm: every token takes a step of its own size, which depends on its hidden state (spheret).

    w = g(h) alpha lambda_l (f - <h,f>/|h|^2 h),   g(h) = 1 + tanh(<u, h>/sqrt(d)),   beta = |w|/|h|
    theta = p arctan(beta/p),   h' = cos(theta) h + sin(theta) |h| w/|w|

The one addition to p-SpheretNorm is u, a learned vector per connection that starts at 0, where g is 1. g stays between
0 and 2: a connection can leave a token where it is, or take up to twice its usual step. Highway Networks (arXiv
1505.00387) gate every coordinate, with a matrix; here one number gates the whole step of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spheret.connections.learned import Float32Module
from spheret.connections.spheret import SpheretNorm, SpheretScheme
from spheret.connections.weights import ParameterRole
from spheret.geometry import compute_dtype


class StateGate(Float32Module):
    """``g(h) = 1 + tanh(<u, h>/sqrt(d))``, (..., d) -> (..., 1), in (0, 2); u starts at 0."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"weight": ParameterRole(decay=False)}

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(compute_dtype(h))
        # Not a matrix product, which autocast would compute in bfloat16.
        return 1 + torch.tanh((x * self.weight).sum(-1, keepdim=True) / math.sqrt(h.shape[-1]))


class GatedSpheretNorm(SpheretNorm):
    """p-SpheretNorm with a step size that depends on the token; ``dim`` is the width of the stream.

    The other arguments are those of :class:`SpheretNorm`.
    """

    def __init__(self, p: float | None = None, *, dim: int, **options: Any) -> None:
        super().__init__(p, **options)
        self.gate = StateGate(dim)

    def update(self, h: Tensor, f: Tensor) -> Tensor:
        return (self.gate(h) * super().update(h, f)).to(f.dtype)


@dataclass(frozen=True, kw_only=True)
class GatedScheme(SpheretScheme):
    """Options of ``gated-spheret:...``: the options of ``spheret``."""

    name: ClassVar[str] = "gated-spheret"
    equation: ClassVar[str] = """w = g alpha lambda_l (f - <h,f>/|h|^2 h),   g = 1 + tanh(<u,h>/sqrt(d))
beta = |w|/|h|,   theta = p arctan(beta/p)
h' = cos(theta) h + sin(theta) |h| w/|w|"""
    cost: ClassVar[str] = (
        "18 units: 6 forward (g from h 1, g f 2, rotation 3), 12 backward (gradient of g f 3, that of h 3, "
        "rotation 6); without a compiler, every step of the formula is a separate operation"
    )
    source: ClassVar[str] = (
        "this project (docs/log-training.md); the gate is that of Highway Networks, arXiv 1505.00387"
    )

    @property
    def summary(self) -> str:
        return f"{super().summary}; with steps that depend on the token"

    def build(self, dim: int, p: float, **options: Any) -> SpheretNorm:
        return GatedSpheretNorm(p, dim=dim, **options)
