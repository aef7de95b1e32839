"""Loss on held-out windows, its standard error over windows, and the unigram loss to compare it with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from spheret.data import Dataset, fixed_windows, unigram_loss
from spheret.models import evaluation_mode

IGNORED = -1
"""Targets with this value are masked: they do not count in the loss."""


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per token over `tokens` targets, and its `standard_error` over windows (NaN for one window).

    `bits_per_byte` is None without byte counts.
    """

    loss: float
    standard_error: float
    bits_per_byte: float | None
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if it overflows."""
        # exp(710) exceeds the largest float64, and math.exp raises an error there.
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Validation:
    """The validation windows of a run.

    `x` and `y` (N, T) int64 are inputs and targets. `token_bytes` (V,) is the number of bytes of text per token.
    `unigram_loss` is the loss, in nats per token, of the training set's token frequencies on `y`; a trained model
    should be well below it. `batch_size` is the number of windows that are evaluated at a time.
    """

    x: np.ndarray
    y: np.ndarray
    token_bytes: np.ndarray
    unigram_loss: float
    batch_size: int

    @classmethod
    def build(cls, dataset: Dataset, *, n_windows: int, block_size: int, batch_size: int) -> Validation:
        """At most `n_windows` windows of `block_size` tokens; the same data and sizes give the same windows.

        There are fewer if the validation shard is too short for `n_windows` windows without overlap. ValueError: it is
        too short for one window.
        """
        # The standard error assumes independent windows, and overlapping windows are not independent.
        side_by_side = max(1, (len(dataset.val) - 1) // block_size)
        x, y = fixed_windows(dataset.val, n_windows=min(n_windows, side_by_side), block_size=block_size)
        return cls(x, y, dataset.tokenizer.token_bytes(), unigram_loss(dataset.train, y), batch_size)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Loss of `model` on all windows."""
        return evaluate(model, self.x, self.y, self.token_bytes, self.batch_size)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: np.ndarray | torch.Tensor,
    y: np.ndarray | torch.Tensor,
    token_bytes: np.ndarray | torch.Tensor | None = None,
    batch_size: int = 8,
) -> Evaluation:
    """Mean cross-entropy of `model` over windows x -> y. For autocast, call this function inside the context.

    Args:
        model: `logits, loss = model(idx)`. Every module in it keeps its mode (training or evaluation).
        x: (N, T) int64 token ids.
        y: (N, T) int64 targets; -1 masks a target.
        token_bytes: (V,) number of bytes of text per token, 0 for special tokens. Bits per byte is the loss summed over
            all targets, including separators, divided by the bytes of their text.
        batch_size: number of windows per forward pass.

    Raises:
        ValueError: no windows, or every target is masked.
    """
    device = next(model.parameters()).device
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.shape != y.shape or x.ndim != 2 or not bool((y != IGNORED).any()):
        raise ValueError(
            f"windows x {tuple(x.shape)}, y {tuple(y.shape)} need one (N, T) shape and a target other than -1"
        )
    losses = _token_losses(model, x, y, batch_size, device)
    # The mean is over targets, not over windows: windows may have different numbers of unmasked targets.
    counts = (y != IGNORED).sum(1).double()
    tokens = counts.sum()
    mean = losses.sum() / tokens
    return Evaluation(
        loss=mean.item(),
        standard_error=_standard_error(losses.sum(1), counts, mean),
        bits_per_byte=None if token_bytes is None else _bits_per_byte(losses, y, torch.as_tensor(token_bytes)),
        tokens=int(tokens),
    )


def _token_losses(model: Any, x: torch.Tensor, y: torch.Tensor, batch_size: int, device: torch.device) -> torch.Tensor:
    """Loss of every target (N, T) in float64 on the CPU, 0 where the target is masked."""
    losses = []
    with evaluation_mode(model):
        for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
            logits, _ = model(inputs.to(device))
            # The logits may be bfloat16, whose cross entropy is too coarse to compare models by.
            flat = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten().to(device), ignore_index=IGNORED, reduction="none"
            )
            losses.append(flat.view(targets.shape).cpu().double())
    return torch.cat(losses)


def _standard_error(sums: torch.Tensor, counts: torch.Tensor, mean: torch.Tensor) -> float:
    """Standard error of the ratio sum(sums) / sum(counts) over N windows.

    By linearisation (Cochran, Sampling Techniques, chapter 6); with equal counts it is the usual sd / sqrt(N).
    """
    n = len(sums)
    if n < 2:
        return math.nan
    residuals = sums - mean * counts
    return (residuals.square().sum() * n / (n - 1)).sqrt().item() / counts.sum().item()


def _bits_per_byte(losses: torch.Tensor, y: torch.Tensor, token_bytes: torch.Tensor) -> float | None:
    # clamp_min: a masked target, -1, is not a valid index; its size is multiplied by 0.
    sizes = token_bytes.cpu().double()[y.clamp_min(0)] * (y != IGNORED)
    total = sizes.sum().item()
    return losses.sum().item() / math.log(2) / total if total > 0 else None
