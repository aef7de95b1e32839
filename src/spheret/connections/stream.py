"""The two ends of a residual stream that lives on a sphere: ScaleNorm behind the embedding, a norm (or none) before
the head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spheret.connections.base import ParameterRole, Stream
from spheret.connections.scalars import Float32Module, LearnedExponent
from spheret.kernels import scale_norm


class Radius(Float32Module):
    """The sphere's radius: one scalar, initially sqrt(d) so that a hidden state has root mean square 1."""

    def __init__(self, dim: int, learn: bool = True) -> None:
        super().__init__()
        self.start = math.sqrt(dim)
        self.gain = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=learn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"gain": ParameterRole(decay=False)}

    def forward(self) -> Tensor:
        return self.gain


class SphereStream(Stream):
    """``enter``: ``g x / |x|`` (ScaleNorm, arXiv 1910.05895, applied once: "modified ScaleNorm in the first layer" of
    arXiv 2608.02668)."""

    def __init__(
        self,
        dim: int,
        *,
        learn_radius: bool = True,
        final_norm: str = "layernorm",
        exponent: LearnedExponent | None = None,
        learns_exponents: bool = False,
    ) -> None:
        super().__init__()
        self.learns_exponents = learns_exponents
        self.radius = Radius(dim, learn_radius)
        self.exponent = exponent  # the one exponent that all connections of a model share, or None
        self.final_norm = nn.LayerNorm(dim, bias=False) if final_norm == "layernorm" else None

    def reset_parameters(self) -> None:
        for module in (self.radius, self.exponent, self.final_norm):
            if module is not None:
                module.reset_parameters()

    def enter(self, h: Tensor) -> Tensor:
        return scale_norm(h, self.radius()).to(h.dtype)

    def exit(self, h: Tensor) -> Tensor:
        return h if self.final_norm is None else self.final_norm(h)

    def after_step(self, model: nn.Module) -> None:
        """Bring learned exponents that left their range back to its end."""
        for module in model.modules() if self.learns_exponents else ():
            if isinstance(module, LearnedExponent):
                module.bound()
