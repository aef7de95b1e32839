"""Small models, batches and data sets that the tests of several files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret.connections import Connection, list_schemes
from spheret.data import DataConfig
from spheret.data.shards import HEADER_BYTES
from spheret.models import GPT, GPTConfig

SMALL: dict[str, Any] = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 61}
TINY: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 11}

# Every registered scheme, and options that take a path of their own.
SCHEMES = [
    *list_schemes(),
    "pre-dyt:preset=paper",
    "keel:preset=paper",
    "spheret:p=0.25,preset=paper",
    "geonorm:reproject=true",
    "proj:update-norm=rms",
    "proj:project=false",
    "proj:head-input=displacement,alpha=0.3,first-alpha=1,alpha-lr=0.1",
]


def build(scheme: str = "pre-ln", *, seed: int = 0, **changes: Any) -> GPT:
    """A GPT of three layers of 32 with ``scheme``, its weights drawn from ``seed``; ``changes`` go into its
    configuration."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(scheme=scheme, **SMALL | changes))


def build_tiny(scheme: str = "pre-ln", *, seed: int = 0, **changes: Any) -> GPT:
    """A GPT of two layers of 16 with a context of 8 and 11 tokens."""
    return build(scheme, seed=seed, **TINY | changes)


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


class _Both(torch.nn.Module):
    """(h, f) -> the next hidden state and what the next sublayer reads of it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def forward(self, h: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.connection(h, f)
        return stream, self.connection.branch_input(stream)


def check_gradients(connection: Connection, dim: int = 6) -> None:
    """Gradients of ``h'`` and of the branch input by ``h``, ``f`` and every parameter, against finite differences."""
    both = _Both(connection.double())
    h, f = random(3, dim).requires_grad_(), random(3, dim, seed=1).requires_grad_()
    parameters = dict(both.named_parameters())

    def function(h: Tensor, f: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(both, dict(zip(parameters, values, strict=True)), (h, f))

    assert torch.autograd.gradcheck(function, (h, f, *parameters.values()))


def data_config(*data: Path, tokenizer: str = "bytes", **settings: object) -> DataConfig:
    """The configuration of a data set of the files ``data``."""
    return DataConfig(data=tuple(map(str, data)), tokenizer=tokenizer, **settings)  # type: ignore[arg-type]


def damage_shard(shard: Path) -> None:
    """Flips one bit of a token."""
    raw = bytearray(shard.read_bytes())
    raw[HEADER_BYTES + 3] ^= 1
    shard.write_bytes(raw)
