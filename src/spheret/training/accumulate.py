"""Gradients of one optimizer step, the same however the batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from spheret.training.device import to_device

IGNORED = -1


def accumulate_gradients(
    forward: Callable[..., Any],
    x: np.ndarray,
    y: np.ndarray,
    *,
    micro_batches: int,
    device: torch.device,
    context: AbstractContextManager[object],
) -> torch.Tensor:
    """Add to every parameter's .grad that of the mean loss over the unmasked targets of x -> y, both (B, T) int64.

    Each micro-batch weighs by the number of its targets that count: the mean of the micro-batches' means would be
    another loss wherever they differ, and gradient clipping would act on another norm. Returns that mean loss, a
    scalar in float32. ValueError: no target counts.
    """
    total = int((y != IGNORED).sum())
    if total == 0:
        raise ValueError(f"all {y.size} targets of the batch are masked with -1; the batch has nothing to learn from")
    mean = torch.zeros((), device=device)
    for inputs, targets in zip(np.array_split(x, micro_batches), np.array_split(y, micro_batches), strict=True):
        counted = int((targets != IGNORED).sum())
        if counted == 0:
            continue
        with context:
            _, loss = forward(to_device(inputs, device), to_device(targets, device))
        share = loss * (counted / total)
        share.backward()
        mean += share.detach()
    return mean


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm` (0: leave them); returns the norm before that."""
    limit = max_norm if max_norm > 0 else float("inf")
    return nn.utils.clip_grad_norm_(parameters, limit).item()
