"""Learned vectors in stored-scale form (arXiv 2410.01131, section 2.5): ``used = stored * start / scale``.

Adam moves every stored number by about the learning rate, whatever its size. A vector that is stored as ``scale``
where ``start`` is meant moves by ``start / scale`` times as much: the ratio is its learning rate, and ``start`` stays
free to be what the network needs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spheret.connections.base import ParameterRole
from spheret.connections.options import Scaling
from spheret.connections.scalars import Float32Module


def scaling(start: float, scale: float | None, dim: int) -> Scaling:
    """A vector that starts at ``start``, stored as ``scale`` or, None, as nGPT's 1/sqrt(d)."""
    return Scaling(start, 1 / math.sqrt(dim) if scale is None else scale)


class ScaledVector(Float32Module):
    """(dim,) float32, ``start`` in every entry; ``positive`` takes the absolute value of what is learned.

    Raises:
        ValueError: a start or a scale of 0, from which no gradient would come back.
    """

    def __init__(self, dim: int, scaling: Scaling, *, positive: bool = False) -> None:
        super().__init__()
        for name, value in zip(scaling._fields, scaling, strict=True):
            if value == 0:
                raise ValueError(f"a learned scale with {name} = 0 never moves: give another number")
        self.scaling, self.positive = scaling, positive
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scaling.scale)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"weight": ParameterRole(decay=False)}

    def forward(self) -> Tensor:
        used = self.weight * (self.scaling.start / self.scaling.scale)
        return used.abs() if self.positive else used
