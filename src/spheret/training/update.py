"""One optimizer step, and when a run counts as lost."""

from __future__ import annotations

import math

from spheret.training.optimizer import set_learning_rate
from spheret.training.state import TrainState

MAX_SKIPPED_IN_A_ROW = 5
"""So many gradients in a row that are not finite mean that the weights, not a batch, are at fault."""


def update_parameters(state: TrainState, lr: float, grad_norm: float) -> None:
    """Apply and clear the gradients in `state`; if their norm is not finite, count the step and change no parameter."""
    if math.isfinite(grad_norm):
        set_learning_rate(state.optimizer, lr)
        state.optimizer.step()
        state.model.after_step()
        state.skipped_in_a_row = 0
    else:
        state.skipped += 1
        state.skipped_in_a_row += 1
    state.optimizer.zero_grad(set_to_none=True)


def divergence(state: TrainState, *, ended: bool = False) -> str | None:
    """Why the run counts as diverged as it stands now, or as it has ended, else None."""
    event = state.monitor.at_end() if ended else state.monitor.diverged
    if event is not None:
        return f"step {event.index + 1}: {event.message}"
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        return f"step {state.step}: the gradients of {state.skipped_in_a_row} steps in a row were not finite"
    return None
