from __future__ import annotations

import math

import numpy as np
import pytest

from spheret.diagnostics.monitor import DivergenceMonitor, Event


def feed(
    losses: np.ndarray | list[float], monitor: DivergenceMonitor | None = None
) -> tuple[DivergenceMonitor, list[Event]]:
    monitor = monitor or DivergenceMonitor()
    events = [monitor.update(float(loss)) for loss in losses]
    return monitor, [event for event in events if event is not None]


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.05, 0.05, n)


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_after_noise_is_flagged_at_its_own_index(seed: int) -> None:
    monitor, events = feed([*(3.0 + noise(100, seed)), 9.0])
    assert [(event.kind, event.index, event.loss) for event in events] == [("spike", 100, 9.0)]
    assert monitor.diverged is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_flagged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert feed(3.0 + noise(2000, seed))[1] == []
    assert feed(3.0 + 0.15 * rng.standard_normal(2000))[1] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_drift_is_divergence_within_200_steps(seed: int) -> None:
    monitor, events = feed(3.0 + noise(200, seed) + 0.01 * np.arange(200))
    assert [event.kind for event in events] == ["drift"]
    assert monitor.diverged == events[0]


def test_a_drift_that_sets_in_late_is_found_as_well() -> None:
    losses = 3.0 + noise(700) + np.concatenate([np.zeros(500), 0.01 * np.arange(200)])
    _, events = feed(losses)
    assert [event.kind for event in events] == ["drift"]
    assert 500 < events[0].index < 700


@pytest.mark.parametrize("vocabulary", [257, 50304])
@pytest.mark.parametrize("seed", range(5))
def test_ordinary_training_is_not_flagged(vocabulary: int, seed: int) -> None:
    """From ln(vocabulary) down, with a plateau at the start and one at the unigram loss, noise of 0.1."""
    start = math.log(vocabulary)
    descent = 1.5 + (start - 1.5) * np.exp(-np.arange(3000) / 300)
    plateau = np.full(150, start)
    middle = np.full(200, descent[150])
    losses = np.concatenate([plateau, descent[:150], middle, descent[150:]])
    losses += 0.1 * np.random.default_rng(seed).standard_normal(len(losses))
    assert feed(losses)[1] == []


def test_a_spike_that_recovers_is_recorded_and_is_no_divergence() -> None:
    losses = 3.0 + noise(600)
    losses[200:205] += 4.0
    losses[400] += 4.0
    monitor, events = feed(losses)
    assert [(event.kind, event.index) for event in events] == [("spike", 200), ("spike", 400)]
    assert monitor.spikes == 2
    assert monitor.diverged is None


def test_a_jump_that_stays_becomes_divergence_and_a_late_recovery_takes_it_back() -> None:
    monitor, events = feed([*(3.0 + noise(100)), *(7.0 + noise(150))])
    assert [event.kind for event in events] == ["spike", "drift"]
    assert monitor.diverged is not None
    feed(3.0 + noise(200), monitor)
    assert monitor.diverged is None


@pytest.mark.parametrize(("lost_for", "diverged"), [(10, False), (40, True), (150, True)])
def test_a_run_that_ends_far_above_its_best_has_diverged(lost_for: int, diverged: bool) -> None:
    """Short runs have no time for the patience that tells a lost run from a slow recovery."""
    monitor, _ = feed([*(3.0 + noise(60)), *(9.0 + noise(lost_for))])
    assert (monitor.at_end() is not None) == diverged
    assert monitor.diverged is None or lost_for == 150
    feed(3.0 + noise(100), monitor)
    assert monitor.at_end() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [0, 1, 50])
def test_a_loss_that_is_not_finite_is_divergence_at_once(bad: float, before: int) -> None:
    monitor, events = feed([*(3.0 + noise(before)), bad, bad])
    assert [(event.kind, event.index) for event in events] == [("nonfinite", before)]
    assert monitor.diverged == events[0]


@pytest.mark.parametrize("cut", [0, 10, 101, 150, 260])
def test_the_state_carries_over(cut: int) -> None:
    losses = [*(3.0 + noise(100)), 9.0, *(3.0 + noise(100, 1)), *(7.0 + noise(150, 2))]
    whole, events = feed(losses)
    first, before = feed(losses[:cut])
    second = DivergenceMonitor()
    second.load_state_dict(first.state_dict())
    _, after = feed(losses[cut:], second)
    assert before + after == events
    assert second.state_dict() == whole.state_dict()


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match="another version"):
        DivergenceMonitor().load_state_dict({"count": 3})


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        DivergenceMonitor(margin=0.0)
