"""Initial weights of a GPT: their scales, by the scheme's rule or nanoGPT's, and drawing them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from spheret.connections import Connection
from spheret.connections.base import InitRule
from spheret.connections.rms import RMSNorm
from spheret.connections.scaled_vector import ScaledVector

NANOGPT_STD = 0.02


@dataclass(frozen=True)
class WeightScales:
    """Standard deviations of initial weights: ``auto``, by the scheme's rule; ``nanogpt``, 0.02 at every width and
    0.02/sqrt(2 n_layer) in last maps."""

    init: str
    rule: InitRule
    n_layer: int

    @property
    def embedding(self) -> float:
        """Of embeddings, and of a head of its own."""
        return NANOGPT_STD if self.init == "nanogpt" else self.rule.embedding_std

    def hidden(self, fan_in: int, *, last: bool) -> float:
        """Of a linear map with ``fan_in`` inputs, the last one of its sublayer or not."""
        if self.init == "nanogpt":
            return NANOGPT_STD / math.sqrt(2 * self.n_layer) if last else NANOGPT_STD
        std = self.rule.gain / math.sqrt(fan_in)
        return std * self.rule.residual_gain if last else std


def initialise(blocks: nn.Module, scales: WeightScales) -> None:
    """Draw every weight matrix of ``blocks``; biases start at 0, all other parameters where their modules put them."""
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=scales.hidden(module.in_features, last=name.endswith("c_proj")))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Connection | ScaledVector | RMSNorm):
            module.reset_parameters()
