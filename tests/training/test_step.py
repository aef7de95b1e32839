"""One optimizer step: micro-batches, clipping, skipped updates, divergence, and compiling with a way back."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest
import torch

from spheret.data import Dataset
from spheret.models import GPT, GPTConfig
from spheret.training import TrainConfig, load_model, train
from spheret.training.state import TrainState, initial_state
from spheret.training.step import (
    MAX_SKIPPED_IN_A_ROW,
    accumulate_gradients,
    clip_gradients,
    divergence,
    update_parameters,
)

Tiny = Callable[..., TrainConfig]
Start = Callable[..., Popen[str]]
CPU = torch.device("cpu")


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, scheme="spheret:p=1"))


def batch(masked: float, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 11, (2, rows, 8))
    # Rows lose unequal numbers of targets, the last one all of them.
    y[rng.random(y.shape) < masked * np.arange(rows)[:, None] / (rows - 1)] = -1
    return x, y


def gradient(model: GPT, x: np.ndarray, y: np.ndarray, micro_batches: int) -> tuple[torch.Tensor, float, float]:
    model.zero_grad(set_to_none=True)
    loss = accumulate_gradients(model, x, y, micro_batches=micro_batches, device=CPU, context=nullcontext())
    norm = clip_gradients(model.parameters(), 0.1)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), norm, loss.item()


@pytest.mark.parametrize("masked", [0.0, 1.0])
@pytest.mark.parametrize("micro_batches", [2, 3, 4, 8])
def test_the_cut_into_micro_batches_changes_nothing(model: GPT, masked: float, micro_batches: int) -> None:
    x, y = batch(masked)
    assert ((y == -1).sum(1) > 0).any() == bool(masked)
    whole, whole_norm, whole_loss = gradient(model, x, y, 1)
    cut, cut_norm, cut_loss = gradient(model, x, y, micro_batches)
    assert whole_norm > 0.1, "clipping must act for the comparison to cover it"
    assert (cut - whole).norm() <= 1e-6 * whole.norm()
    assert cut_norm == pytest.approx(whole_norm, rel=1e-6)
    assert cut_loss == pytest.approx(whole_loss, rel=1e-6)


def test_the_loss_is_the_mean_over_unmasked_targets(model: GPT) -> None:
    x, y = batch(1.0)
    _, expected = model(torch.from_numpy(x), torch.from_numpy(y))
    assert gradient(model, x, y, 4)[2] == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_without_targets_is_refused(model: GPT) -> None:
    x, y = batch(0.0)
    with pytest.raises(ValueError, match="all 64 targets"):
        gradient(model, x, np.full_like(y, -1), 2)


def test_no_clipping_leaves_the_gradient(model: GPT) -> None:
    x, y = batch(0.0)
    accumulate_gradients(model, x, y, micro_batches=1, device=CPU, context=nullcontext())
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = clip_gradients(model.parameters(), 0.0)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert norm == pytest.approx(torch.cat([g.flatten() for g in before]).norm().item(), rel=1e-5)


# --- the update ---


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


# --- compiling ---


def test_a_compiler_that_does_not_work_costs_one_warning(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, start: Start
) -> None:
    config = tiny(compile="on", dropout=0.1)
    config = replace(config, steps=3, model=replace(config.model, n_layer=1))
    broken = {"CC": "/bin/false", "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    process = start(config, tmp_path / "broken", **broken)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    warned = [line for line in errors.splitlines() if "Warning" in line]
    assert len(warned) == 1, errors
    assert "torch.compile failed, training continues in eager mode: " in warned[0]
    assert "/bin/false" in warned[0]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other process
    try:
        train(replace(config, compile="off"), tmp_path / "eager", dataset=dataset)
    finally:
        torch.set_num_threads(threads)
    broken_run, eager = (load_model(tmp_path / name).state_dict() for name in ("broken", "eager"))
    assert all(torch.equal(broken_run[name], eager[name]) for name in eager), "the failed attempt leaves no trace"
