from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from spheret.training import TrainConfig
from spheret.training.accumulate import clip_gradients
from spheret.training.state import TrainState, initial_state
from spheret.training.update import MAX_SKIPPED_IN_A_ROW, divergence, update_parameters

Tiny = Callable[..., TrainConfig]


@pytest.fixture
def state(tiny: Tiny) -> TrainState:
    return initial_state(tiny(scheme="spheret:p=learn"), torch.device("cpu"))


def step(state: TrainState, poison: float | None = None) -> None:
    """One step on random tokens; `poison` is put into one entry of one gradient."""
    x, y = torch.randint(0, 257, (2, 2, 8))
    _, loss = state.model(x, y)
    loss.backward()
    if poison is not None:
        next(state.model.parameters()).grad.view(-1)[3] = poison  # type: ignore[union-attr]
    update_parameters(state, 1e-3, clip_gradients(state.model.parameters(), 1.0))
    state.step += 1


def parameters(state: TrainState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in state.model.parameters()]


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(state: TrainState, poison: float) -> None:
    for _ in range(3):
        step(state)
    before = parameters(state)
    moments = [value.clone() for s in state.optimizer.state.values() for value in s.values()]
    step(state, poison)
    assert all(torch.equal(a, b) for a, b in zip(parameters(state), before, strict=True))
    after = [value for s in state.optimizer.state.values() for value in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))
    assert (state.skipped, state.skipped_in_a_row) == (1, 1)
    assert all(p.grad is None for p in state.model.parameters())

    step(state)
    assert any(not torch.equal(a, b) for a, b in zip(parameters(state), before, strict=True))
    assert all(bool(p.isfinite().all()) for p in parameters(state))
    assert (state.skipped, state.skipped_in_a_row) == (1, 0)


def test_several_in_a_row_are_divergence(state: TrainState) -> None:
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        step(state, math.inf)
    assert divergence(state) is None
    step(state)
    for _ in range(MAX_SKIPPED_IN_A_ROW):
        assert divergence(state) is None
        step(state, math.nan)
    reason = divergence(state)
    assert reason is not None and f"{MAX_SKIPPED_IN_A_ROW} steps in a row" in reason


def test_the_monitors_verdict_names_the_step(state: TrainState) -> None:
    for loss in (3.0, 3.0, math.nan):
        state.monitor.update(loss)
    reason = divergence(state)
    assert reason is not None and reason.startswith("step 3:") and "nan" in reason


def test_every_parameter_gets_a_finite_gradient_and_moves(state: TrainState) -> None:
    before = parameters(state)
    step(state)
    names = [name for name, _ in state.model.named_parameters()]
    still = [name for name, a, b in zip(names, parameters(state), before, strict=True) if torch.equal(a, b)]
    assert still == []
