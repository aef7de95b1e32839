r"""GeoNorm: the exponential map, ``theta = beta`` (arXiv 2601.22095), the limit p -> inf of p-SpheretNorm.

    h' = cos(beta) h + sin(beta) |h| w/|w|,   w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|

Step size, decay and ScaleNorm are the same as in the other SpheretNorms, so that a comparison varies only the map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from spheret.connections.base import counts_from_zero
from spheret.connections.spheret import ALPHA_LR, PAPER, AlphaForm, Count, Decay, SpheretNorm, SpheretScheme, UpdateNorm


class GeoNorm(SpheretNorm):
    """p = inf: geodesics of the sphere. Arguments as for :class:`SpheretNorm`; defaults of ``geonorm``."""

    @counts_from_zero
    def __init__(
        self,
        *,
        layer_idx: int = 0,
        n_layer: int | None = None,
        sublayer: int = 0,
        alpha: float | None = None,
        learn_p: bool = False,
        decay: Decay = "none",
        count: Count = "block",
        alpha_form: AlphaForm = "raw",
        alpha_lr: float = ALPHA_LR,
        project: bool = True,
        update_norm: UpdateNorm = "none",
        radius: nn.Module | None = None,
    ) -> None:
        super().__init__(
            math.inf,
            layer_idx=layer_idx,
            n_layer=n_layer,
            sublayer=sublayer,
            alpha=alpha,
            learn_p=learn_p,
            decay=decay,
            count=count,
            alpha_form=alpha_form,
            alpha_lr=alpha_lr,
            project=project,
            update_norm=update_norm,
            radius=radius,
        )


@dataclass(frozen=True, kw_only=True)
class GeoNormScheme(SpheretScheme):
    """Options of ``geonorm:...``: the options of ``spheret``, with p fixed at inf."""

    name: ClassVar[str] = "geonorm"
    equation: ClassVar[str] = """w = alpha lambda_l (f - <h,f>/|h|^2 h),   beta = |w|/|h|,   theta = beta
h' = cos(theta) h + sin(theta) |h| w/|w|"""
    source: ClassVar[str] = "arXiv 2601.22095"

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"default": {}, "paper": PAPER}

    p: float = math.inf  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p != math.inf:
            raise ValueError(f"geonorm with p = {self.p}: GeoNorm is p = inf; write spheret:p={self.p}")
