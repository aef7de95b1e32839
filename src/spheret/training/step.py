"""One optimizer step: gradients over micro-batches, clipping, update, and what to do when something is not finite.

A step calls, in this order, `accumulate_gradients`, `clip_gradients` and `update_parameters`; then `divergence` says
whether the run is lost. `compile_or_eager` chooses the forward pass that `accumulate_gradients` calls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from spheret.evaluation import IGNORED
from spheret.training.device import to_device
from spheret.training.optimizer import set_learning_rate
from spheret.training.state import TrainState

Forward = Callable[..., Any]
"""(idx, targets) -> (logits, loss): the model, or the model compiled."""

MAX_SKIPPED_IN_A_ROW = 5
"""After this many non-finite gradients in a row the weights are at fault, not one batch."""


def accumulate_gradients(
    forward: Forward,
    x: np.ndarray,
    y: np.ndarray,
    *,
    micro_batches: int,
    device: torch.device,
    context: AbstractContextManager[object],
) -> torch.Tensor:
    """Add to every parameter's .grad the gradient of the mean loss over the unmasked targets of x -> y.

    Args:
        forward: the model, or the model compiled.
        x: (B, T) int64 token ids.
        y: (B, T) int64 targets, -1 where no loss is taken.
        micro_batches: parts that the batch is cut into; the gradient does not depend on it.
        device: where the model is.
        context: autocast, or a context that does nothing.

    Returns:
        That mean loss in nats per target, a scalar in float32.

    Raises:
        ValueError: every target is masked.
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
        # Each micro-batch weighs by its unmasked targets. The plain mean of the micro-batches' means would be another
        # loss wherever those counts differ, and clipping would act on another norm.
        share = loss * (counted / total)
        share.backward()
        mean += share.detach()
    return mean


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients down to a global norm of at most `max_norm` (0: no limit); returns the norm before that."""
    limit = max_norm if max_norm > 0 else float("inf")
    return nn.utils.clip_grad_norm_(parameters, limit).item()


def update_parameters(state: TrainState, lr: float, grad_norm: float) -> None:
    """Apply the gradients in `state`, then clear them.

    A non-finite norm changes no parameter and no moment of AdamW: the step is counted as skipped.
    """
    if math.isfinite(grad_norm):
        set_learning_rate(state.optimizer, lr)
        state.optimizer.step()
        state.model.after_step()  # the scheme's weight constraint
        state.skipped_in_a_row = 0
    else:
        state.skipped += 1
        state.skipped_in_a_row += 1
    state.optimizer.zero_grad(set_to_none=True)


def divergence(state: TrainState, *, ended: bool = False) -> str | None:
    """Why the run counts as diverged, or None. `ended`: no step follows in which the loss could recover."""
    event = state.monitor.at_end() if ended else state.monitor.diverged
    if event is not None:
        return f"step {event.index + 1}: {event.message}"
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        return f"step {state.step}: the gradients of {state.skipped_in_a_row} steps in a row were not finite"
    return None


def wants_compile(mode: str, device: torch.device) -> bool:
    """Whether to compile: `auto` means on CUDA only. On a CPU, compiling takes longer than most runs gain."""
    return mode == "on" or (mode == "auto" and device.type == "cuda")


def compile_or_eager(model: nn.Module, trial: Callable[[Forward], object]) -> Forward:
    """The compiled model, or `model` itself, after one warning with the reason, where compiling fails.

    A machine without a working compiler thus trains in eager mode. `trial` runs one forward and backward pass through
    its argument, as training will; the compiler starts only then. Gradients and random state are restored. Running out
    of device memory is not the compiler's failure and is raised.
    """
    forward: Forward = torch.compile(model)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            trial(forward)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's backends raise errors of many unrelated types
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            warnings.warn(f"torch.compile failed, training continues in eager mode: {reason}", stacklevel=2)
            torch.compiler.reset()
            forward = model
    model.zero_grad(set_to_none=True)
    return forward
