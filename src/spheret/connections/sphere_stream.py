"""The two ends of a stream on a sphere: ScaleNorm after the embedding; before the head, what it reads, and a norm."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from spheret.connections.base import Stream
from spheret.connections.learned import LearnedExponent, Radius
from spheret.connections.norms import build_norm
from spheret.geometry import compute_dtype
from spheret.kernels import scale_norm

FinalNorm = Literal["layernorm", "none"]
HeadInput = Literal["state", "displacement"]


class SphereStream(Stream):
    """The stream on a sphere: ScaleNorm after the embedding, a norm (or none) before the head.

    ``enter`` is ``g x / |x|``, ScaleNorm (arXiv 1910.05895) applied once. arXiv 2608.02668 calls it the "modified
    ScaleNorm in the first layer".
    """

    def __init__(
        self,
        dim: int,
        *,
        learn_radius: bool = True,
        final_norm: FinalNorm = "layernorm",
        exponent: LearnedExponent | None = None,
        learns_exponents: bool = False,
        head_input: HeadInput = "state",
    ) -> None:
        super().__init__()
        self.learns_exponents, self.head_input = learns_exponents, head_input
        self.radius = Radius(dim, learn_radius)
        self.exponent = exponent  # the one exponent that all connections of a model share, or None
        self.final_norm = build_norm(final_norm, dim)

    def enter(self, h: Tensor) -> Tensor:
        return scale_norm(h, self.radius()).to(h.dtype)

    def exit(self, h: Tensor, entry: Tensor | None = None) -> Tensor:
        if self.head_input == "displacement":
            if entry is None:
                warnings.warn(
                    "stream.exit(h) without an entry: the head reads the state instead of its displacement; give what "
                    "stream.enter returned too, stream.exit(h, entry), or set head-input=state",
                    stacklevel=2,
                )
            else:
                h = displacement(h, entry)
        return h if self.final_norm is None else self.final_norm(h)

    def after_step(self, model: nn.Module) -> None:
        """Clamp learned exponents that have left their range."""
        for module in model.modules() if self.learns_exponents else ():
            if isinstance(module, LearnedExponent):
                module.bound()


def displacement(h: Tensor, entry: Tensor) -> Tensor:
    """The part of ``h`` that is tangent to the sphere at ``entry``, the direction in which a token has moved; both
    (..., d), the result in the dtype of ``h``."""
    dtype = compute_dtype(h, entry)
    x, start = h.to(dtype), entry.to(dtype)
    # Both lie on the learned sphere, so neither scaling nor a second projection is needed, as in the connections.
    along = (x * start).sum(-1, keepdim=True) / (start * start).sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.addcmul(x, along, start, value=-1).to(h.dtype)
