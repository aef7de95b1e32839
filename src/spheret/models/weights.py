"""The linear layers of a GPT: initial weights, by the scheme's rule or nanoGPT's, and constant factors on outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from spheret.connections import Connection
from spheret.connections.learned import ScaledVector
from spheret.connections.norms import RMSNorm
from spheret.connections.options import InitRule
from spheret.connections.weights import Kind

NANOGPT_STD = 0.02
P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


def undrawn(build: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """``build(*args, **kwargs)`` on the current default device, its parameters left uninitialised.

    PyTorch's layers draw their initial weights when they are built. A model that draws them again, by its own rule,
    would then use up other random numbers than one that comes from the meta device and is only reset.
    """
    device = torch.empty(0).device
    with torch.device("meta"):
        module = build(*args, **kwargs)
    # As module.to_empty does, which fails on fake tensors.
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty_like(parameter, device=device)))
    return module


def of_kind(kind: Kind, linear: nn.Linear) -> nn.Linear:
    """``linear``, marked for :func:`spheret.connections.parameter_roles` as a matrix of this kind."""
    linear.kind = kind  # type: ignore[assignment]
    return linear


@dataclass(frozen=True)
class WeightScales:
    """Standard deviations of initial weights.

    Attributes:
        init: ``auto`` follows ``rule``; ``nanogpt`` is 0.02 at every width, and 0.02/sqrt(2 n_layer) in the last
            projection of every sublayer.
        rule: the scheme's rule.
        n_layer: number of blocks.
    """

    init: str
    rule: InitRule
    n_layer: int

    @property
    def embedding(self) -> float:
        """For embeddings, and for an untied head."""
        return NANOGPT_STD if self.init == "nanogpt" else self.rule.embedding_std

    def hidden(self, fan_in: int, *, last: bool) -> float:
        """For a linear layer with ``fan_in`` inputs. ``last``: whether it is the last projection of its sublayer."""
        if self.init == "nanogpt":
            return NANOGPT_STD / math.sqrt(2 * self.n_layer) if last else NANOGPT_STD
        std = self.rule.gain / math.sqrt(fan_in)
        return std * self.rule.residual_gain if last else std


def initialise(blocks: nn.Module, scales: WeightScales) -> None:
    """Draw every weight matrix of ``blocks``. Biases start at 0, other parameters where their modules reset them."""
    # nanoGPT's name c_proj marks the last projection, in attention and in the MLP.
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=scales.hidden(module.in_features, last=name.endswith("c_proj")))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Connection | ScaledVector | RMSNorm):
            module.reset_parameters()


def times(x: Tensor, factor: float) -> Tensor:
    """``factor x``, without a multiplication where the factor is 1."""
    return x if factor == 1 else factor * x


def scale_outputs(linear: nn.Linear, factor: float | Tensor) -> None:
    """Multiply weight and bias of ``linear`` in place by ``factor``: one number, or one per output (out_features,)."""
    linear.weight.mul_(factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor)
    if linear.bias is not None:
        linear.bias.mul_(factor)
