"""The validation windows of a run and the loss they are read against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from spheret.data import Dataset, fixed_windows, unigram_loss
from spheret.evaluation import Evaluation, evaluate
from spheret.models import GPT
from spheret.training.config import TrainConfig
from spheret.training.device import resolve_device


@dataclass(frozen=True)
class Validation:
    """Windows x -> y (N, T) int64, the bytes of each token (V,), and the unigram loss on y in nats per token."""

    x: np.ndarray
    y: np.ndarray
    token_bytes: np.ndarray
    unigram_loss: float
    batch_size: int

    @classmethod
    def build(cls, config: TrainConfig, dataset: Dataset) -> Validation:
        """The same windows for every run with this data, block size and number of windows.

        No more than fit side by side: the standard error takes windows for independent, and overlapping ones are not.
        """
        block_size = config.model.block_size
        side_by_side = max(1, (len(dataset.val) - 1) // block_size)
        x, y = fixed_windows(dataset.val, n_windows=min(config.eval_windows, side_by_side), block_size=block_size)
        batch_size = -(-config.batch_size // config.grad_accum)
        return cls(x, y, dataset.tokenizer.token_bytes(), unigram_loss(dataset.train, y), batch_size)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Loss of the model on all windows."""
        return evaluate(model, self.x, self.y, self.token_bytes, self.batch_size)


def check_buildable(config: TrainConfig) -> None:
    """ValueError: a device that is not there, or a scheme that makes no model of this shape. Needs no data."""
    resolve_device(config.device)
    with torch.device("meta"):
        GPT(config.model)


def check_vocabulary(config: TrainConfig, dataset: Dataset) -> None:
    """ValueError: the model has fewer token embeddings than the tokenizer has tokens (more are allowed: padding)."""
    needed = dataset.tokenizer.vocab_size
    if config.model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is too small for tokenizer {dataset.tokenizer.name!r}; "
            f"use {needed} or more"
        )
