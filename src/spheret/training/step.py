"""One optimizer step: gradients over micro-batches, clipping, the update, and the handling of non-finite values.

A step calls `accumulate_gradients`, `clip_gradients` and `update_parameters`, in this order; then `divergence` decides
whether the run has diverged. `compile_or_eager` chooses the forward pass that `accumulate_gradients` calls.
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
"""(idx, targets) -> (logits, loss): the model or the compiled model."""

MAX_SKIPPED_IN_A_ROW = 5
"""After this many non-finite gradients in a row the fault lies in the weights, not in one batch."""


def accumulate_gradients(
    forward: Forward,
    x: np.ndarray,
    y: np.ndarray,
    *,
    micro_batches: int,
    device: torch.device,
    context: AbstractContextManager[object],
) -> torch.Tensor:
    """Add the gradient of the mean loss over the unmasked targets to every parameter's .grad.

    Args:
        forward: the model or the compiled model.
        x: (B, T) int64 token ids.
        y: (B, T) int64 targets; -1 masks a target.
        micro_batches: number of parts that the batch is split into; the gradient does not depend on it.
        device: the device of the model.
        context: autocast, or a context that does nothing.

    Returns:
        The mean loss in nats per target, a float32 scalar.

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
        # Each micro-batch is weighted by its number of unmasked targets. If these numbers differ, the plain mean of the
        # micro-batch losses is another loss, and clipping would act on another norm.
        share = loss * (counted / total)
        share.backward()
        mean += share.detach()
    return mean


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm` (0: no limit); returns the norm before scaling."""
    # Without a limit the call still measures the norm, which the log and the check for non-finite gradients need.
    limit = max_norm if max_norm > 0 else float("inf")
    return nn.utils.clip_grad_norm_(parameters, limit).item()


def update_parameters(state: TrainState, lr: float, grad_norm: float) -> None:
    """Apply the gradients to the parameters in `state`, then clear them.

    If the norm is not finite, neither the parameters nor AdamW's moments change, and the step counts as skipped.
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
    """Why the run counts as diverged, or None. `ended`: the run has no steps left in which the loss could recover."""
    event = state.monitor.at_end() if ended else state.monitor.diverged
    if event is not None:
        return f"step {event.index + 1}: {event.message}"
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        return f"step {state.step}: the gradients of {state.skipped_in_a_row} steps in a row were not finite"
    return None


def wants_compile(mode: str, device: torch.device) -> bool:
    """Whether to compile; `auto` compiles on CUDA only. On a CPU, most runs lose more time compiling than they gain."""
    return mode == "on" or (mode == "auto" and device.type == "cuda")


def compile_or_eager(model: nn.Module, trial: Callable[[Forward], object]) -> Forward:
    """The compiled model. If compiling fails: `model` itself, after a warning with the reason.

    A machine without a working compiler thus trains in eager mode. `trial` must run one forward and backward pass
    through its argument, as in training. Gradients are cleared afterwards, and the random state is restored. Running
    out of device memory is not a failure of the compiler and is raised.
    """
    # torch.compile returns at once and compiles at the first call, so only a trial shows whether it works.
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
