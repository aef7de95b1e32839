"""Small models and batches that the tests of several rooms share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spheret.connections import Connection
from spheret.models import GPT, GPTConfig

SMALL: dict[str, Any] = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 61}


def build(scheme: str = "pre-ln", *, seed: int = 0, **changes: Any) -> GPT:
    """A GPT of three layers of 32 with ``scheme``, its weights drawn from ``seed``; ``changes`` go into its
    configuration."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(scheme=scheme, **SMALL | changes))


def batch(rows: int = 4, length: int = 16, vocab_size: int = 61, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and the tokens that follow them, each (rows, length) and contiguous."""
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def connections(model: GPT) -> list[Connection]:
    """The connections of ``model``, in the order in which the stream passes them."""
    return [connection for block in model.blocks for _, _, connection in block.sublayers()]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, the same for the same seed wherever they are drawn."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension, in float64."""
    return x.double().pow(2).mean(-1).sqrt()
