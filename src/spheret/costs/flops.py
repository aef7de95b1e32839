"""Floating-point operations of a training step, ``6 N + 12 L d T`` for each token (PaLM, arXiv 2204.02311, appendix B).

N counts the weights of matrix products, the head among them and embeddings not; a product of a weight and a number
is 2 operations, and the backward pass makes two products for each of the forward pass. The second term is the scores
and averages of attention over all T tokens of the context, masked or not. Elementwise work is left out: it is memory
traffic and not arithmetic that it costs.
"""

from __future__ import annotations

import torch
from torch import nn

from spheret.models import GPT, GPTConfig


def block_flops(config: GPTConfig) -> int:
    """Of the forward pass of all blocks, for each token of a full context."""
    weights = sum(m.weight.numel() for m in _on_meta(config).blocks.modules() if isinstance(m, nn.Linear))
    return 2 * weights + 4 * config.n_layer * config.n_embd * config.block_size


def forward_flops(config: GPTConfig) -> int:
    """Of the forward pass, head included, for each token of a full context."""
    return block_flops(config) + 2 * config.vocab_size * config.n_embd


def training_flops(config: GPTConfig) -> int:
    """Of forward and backward pass, for each token of a full context."""
    return 3 * forward_flops(config)


def count_parameters(config: GPTConfig) -> int:
    """Parameters of the model, shared ones once."""
    return _on_meta(config).num_parameters()


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)
