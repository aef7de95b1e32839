r"""GeoNorm: the exponential map, ``theta = beta`` (arXiv 2601.22095), the limit p -> inf of p-SpheretNorm.

    h' = cos(beta) h + sin(beta) |h| w/|w|,   w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|

Same step size, decay and ScaleNorm as the other SpheretNorms, so that a comparison varies the map alone. Cost: as
p-SpheretNorm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from spheret.connections.spheret import SpheretNorm, SpheretScheme


class GeoNorm(SpheretNorm):
    """p = inf: geodesics of the sphere."""

    def __init__(self, *, layer_idx: int = 0, **options: float | bool | str) -> None:
        super().__init__(math.inf, layer_idx=layer_idx, **options)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class GeoNormScheme(SpheretScheme):
    """Options of ``geonorm:...``: those of ``spheret`` with p = inf."""

    name: ClassVar[str] = "geonorm"
    equation: ClassVar[str] = """w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|,   theta = beta
h' = cos(theta) h + sin(theta) |h| w/|w|"""
    source: ClassVar[str] = "arXiv 2601.22095"

    p: float = math.inf  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p != math.inf:
            raise ValueError(f"geonorm with p = {self.p}: GeoNorm is p = inf; write spheret:p={self.p}")
