"""A model for inference, its constant factors multiplied into the weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from spheret.models.attention import CausalSelfAttention
from spheret.models.gpt import GPT
from spheret.models.mlp import SwiGLU


@torch.no_grad()
def fold_factors(model: GPT) -> GPT:
    """A copy of ``model`` with the same logits and no factors left to apply; ``config.folded`` says so.

    Its weights are no longer those that the scheme's constraint holds, so it is not for training: ``after_step``
    refuses.
    """
    folded = copy.deepcopy(model)
    for module in folded.modules():
        if isinstance(module, CausalSelfAttention | SwiGLU):
            module.fold()
    folded.config = replace(model.config, folded=True)
    return folded
