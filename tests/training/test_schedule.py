from __future__ import annotations

import itertools
import math

import pytest

from spheret.training import learning_rate


def curve(steps: int, **options: object) -> list[float]:
    return [learning_rate(step, lr=2.0, steps=steps, **options) for step in range(steps)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_reaches_the_peak(kind: str) -> None:
    rates = curve(100, warmup_steps=9, kind=kind)
    assert rates[:10] == pytest.approx([2.0 * (i + 1) / 10 for i in range(10)])
    assert max(rates) == 2.0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [10, 11, 1000])
def test_the_decay_ends_exactly_at_the_last_step(kind: str, ratio: float, steps: int) -> None:
    rates = curve(steps, warmup_steps=3, kind=kind, min_lr_ratio=ratio)
    assert rates[-1] == ratio * 2.0
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert ratio == 1.0 or rates[-2] > rates[-1]


def test_cosine_passes_its_middle_half_way() -> None:
    assert curve(101, kind="cosine", min_lr_ratio=0.5)[50] == pytest.approx(1.5)


def test_wsd_is_constant_and_then_linear() -> None:
    rates = curve(100, kind="wsd", min_lr_ratio=0.0, decay_fraction=0.2)
    assert rates[:80] == [2.0] * 80
    assert rates[80:] == pytest.approx([2.0 * (1 - (i + 1) / 20) for i in range(20)])


def test_constant_stays() -> None:
    assert curve(10, kind="constant") == [2.0] * 10


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_single_step_has_a_rate(kind: str) -> None:
    assert all(0 < rate <= 2.0 and math.isfinite(rate) for rate in curve(1, kind=kind))


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="use 0 to 9"):
        learning_rate(step, lr=1.0, steps=10)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'linear'"):
        learning_rate(0, lr=1.0, steps=10, kind="linear")  # type: ignore[arg-type]
