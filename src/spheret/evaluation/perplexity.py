"""Loss on held-out windows, with the error that the choice of windows leaves in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -1


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per token, its `standard_error` over windows (NaN for one); `bits_per_byte` needs byte counts."""

    loss: float
    standard_error: float
    bits_per_byte: float | None
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: np.ndarray | torch.Tensor,
    y: np.ndarray | torch.Tensor,
    token_bytes: np.ndarray | torch.Tensor | None = None,
    batch_size: int = 8,
) -> Evaluation:
    """Mean cross-entropy of `model` over windows x -> y, both (N, T) int64, targets of -1 left out.

    `token_bytes` (V,) is the number of bytes of text each token stands for, 0 for specials: bits per byte is the loss
    summed over all targets over their bytes of text, so that every tokenizer pays for its document separators. The
    logits may be bfloat16, the loss is computed in float32. The model's mode is restored. For autocast, call it
    inside the context. ValueError: no windows, or no target that counts.
    """
    device = next(model.parameters()).device
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.shape != y.shape or x.ndim != 2 or not bool((y != IGNORED).any()):
        raise ValueError(
            f"windows x {tuple(x.shape)}, y {tuple(y.shape)} need one (N, T) shape and a target other than -1"
        )
    losses = _token_losses(model, x, y, batch_size, device)
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
    """Loss of every target (N, T) in float64 on the CPU, 0 where ignored."""
    training = model.training
    model.eval()
    try:
        losses = []
        for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
            logits, _ = model(inputs.to(device))
            flat = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten().to(device), ignore_index=IGNORED, reduction="none"
            )
            losses.append(flat.view(targets.shape).cpu().double())
        return torch.cat(losses)
    finally:
        model.train(training)


def _standard_error(sums: torch.Tensor, counts: torch.Tensor, mean: torch.Tensor) -> float:
    """Of the ratio sum(sums) / sum(counts) over windows; with equal counts the usual sd / sqrt(N)."""
    n = len(sums)
    if n < 2:
        return math.nan
    residuals = sums - mean * counts
    return (residuals.square().sum() * n / (n - 1)).sqrt().item() / counts.sum().item()


def _bits_per_byte(losses: torch.Tensor, y: torch.Tensor, token_bytes: torch.Tensor) -> float | None:
    sizes = token_bytes.cpu().double()[y.clamp_min(0)] * (y != IGNORED)
    total = sizes.sum().item()
    return losses.sum().item() / math.log(2) / total if total > 0 else None
