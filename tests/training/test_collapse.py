"""What counts as collapsed: a loss that stopped at the unigram plateau, or tokens that became alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spheret.data import Dataset
from spheret.training import COLLAPSE_MARGIN, TrainConfig, has_collapsed, read_metrics, read_result, train
from spheret.training.collapse import ALIKE_COSINE, STOPPED_MARGIN, fall_in_second_half

PLATEAU = 7.70


def evaluated(*losses: float, every: int = 30) -> list[dict[str, Any]]:
    return [{"step": every * i, "loss": loss, "val_loss": loss} for i, loss in enumerate(losses, start=1)]


def trained(*losses: float) -> list[dict[str, Any]]:
    """Records of a run that was evaluated only at its end."""
    records: list[dict[str, Any]] = [{"step": 10 * i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    records[-1]["val_loss"] = losses[-1]
    return records


@pytest.mark.parametrize("make", [evaluated, trained])
@pytest.mark.parametrize("end", [7.50, 7.70, 7.82, 8.0])
def test_a_run_that_is_still_falling_is_undertrained_and_not_collapsed(make: Any, end: float) -> None:
    falling = make(*(end + step for step in (0.49, 0.45, 0.40, 0.3, 0.19, 0.14, 0.07, 0.0)))
    assert not has_collapsed(end, PLATEAU, falling)
    assert not has_collapsed(end, PLATEAU, falling, token_cosine=1.0)


@pytest.mark.parametrize("make", [evaluated, trained])
@pytest.mark.parametrize("end", [7.52, 7.70, 7.85])
def test_a_loss_that_stopped_near_the_plateau_has_collapsed(make: Any, end: float) -> None:
    assert has_collapsed(end, PLATEAU, make(10.0, end + 0.05, end + 0.01, end + 0.02, end - 0.01, end, end + 0.01, end))


def test_a_loss_that_stopped_far_above_the_plateau_has_collapsed_only_if_the_tokens_are_alike() -> None:
    """Otherwise the learning rate may have been too small to get anywhere."""
    flat = evaluated(9.0, 9.01, 9.0, 9.0)
    assert not has_collapsed(9.0, PLATEAU, flat)
    assert not has_collapsed(9.0, PLATEAU, flat, token_cosine=ALIKE_COSINE - 0.01)
    assert has_collapsed(9.0, PLATEAU, flat, token_cosine=ALIKE_COSINE)


def test_a_run_that_learned_has_not_collapsed_however_alike_its_tokens_are() -> None:
    learned = (1 - COLLAPSE_MARGIN) * PLATEAU - 0.01
    assert not has_collapsed(learned, PLATEAU, evaluated(*[learned] * 4), token_cosine=1.0)


def test_the_fall_is_that_of_the_second_half() -> None:
    assert fall_in_second_half(evaluated(8.31, 8.01, 7.89, 7.82)) == pytest.approx(0.19)
    assert fall_in_second_half(trained(9.0, 8.0, 7.9, 7.8)) == pytest.approx(0.2)
    assert fall_in_second_half([]) is None
    assert fall_in_second_half(trained(9.0)) is None, "too short to tell"


def test_without_a_finite_loss_nothing_has_collapsed() -> None:
    assert not has_collapsed(None, PLATEAU, evaluated(7.7, 7.7))


Tiny = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    "changes", [{"steps": 5}, {"lr": 1e-6}, {"steps": 20, "lr": 3e-4, "eval_interval": 5}], ids=str
)
def test_a_run_that_is_too_short_or_too_slow_is_not_called_collapsed(
    changes: dict[str, Any], tiny: Tiny, tmp_path: Path, dataset: Dataset
) -> None:
    result = train(tiny(**changes), tmp_path, dataset=dataset)
    assert result.outcome == "finished" and result.val_loss is not None
    assert result.val_loss > (1 - COLLAPSE_MARGIN) * result.unigram_loss, "the test needs a run that learned little"
    assert not result.collapsed and not read_result(tmp_path).collapsed


def test_a_run_whose_tokens_become_one_is_called_collapsed(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    """A learning rate a hundred times too large: what the attention adds is the same for every token."""
    config = tiny("post-ln", steps=120, batch_size=8, lr=0.3, warmup_ratio=0.0, eval_interval=20)
    result = train(config, tmp_path, dataset=dataset)
    losses = [line["val_loss"] for line in read_metrics(tmp_path) if "val_loss" in line]
    assert result.outcome == "finished" and result.collapsed, (losses, result.unigram_loss)
    assert (losses[2] - losses[-1]) < STOPPED_MARGIN * result.unigram_loss
    assert read_result(tmp_path) == result and '"collapsed": true' in (tmp_path / "run.json").read_text()
