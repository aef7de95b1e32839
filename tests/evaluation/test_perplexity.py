from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from spheret.evaluation import evaluate

VOCAB = 256


class Fixed(nn.Module):
    """Answers with given logits (V,) in a given dtype, whatever the tokens are."""

    def __init__(self, logits: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.drop = nn.Dropout(0.5)
        self.dtype = dtype

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        return self.drop(self.logits).expand(*idx.shape, -1).to(self.dtype), None


@pytest.fixture
def windows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCAB, (7, 12)), rng.integers(0, VOCAB, (7, 12))


def skewed() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_a_uniform_model_needs_eight_bits_a_byte(windows: tuple[np.ndarray, np.ndarray]) -> None:
    result = evaluate(Fixed(torch.zeros(VOCAB)), *windows, np.ones(VOCAB, np.int32))
    assert result.bits_per_byte == pytest.approx(8.0, abs=1e-6)
    assert result.loss == pytest.approx(math.log(VOCAB), abs=1e-6)
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-5)
    assert result.standard_error == pytest.approx(0.0, abs=1e-6)
    assert result.tokens == 84


def test_bits_per_byte_counts_bytes_not_tokens() -> None:
    """Targets of 1, 3 and 0 bytes: three tokens' bits over four bytes."""
    y = np.array([[0, 1, 2]])
    sizes = np.array([1, 3, 0] + [1] * (VOCAB - 3), np.int32)
    result = evaluate(Fixed(torch.zeros(VOCAB)), y, y, sizes)
    assert result.bits_per_byte == pytest.approx(3 * 8 / 4)
    assert evaluate(Fixed(torch.zeros(VOCAB)), y, y).bits_per_byte is None


@pytest.mark.parametrize("batch_size", [1, 3, 7, 50])
def test_mean_and_standard_error_are_those_of_the_windows(
    windows: tuple[np.ndarray, np.ndarray], batch_size: int
) -> None:
    x, y = windows
    per_window = -torch.log_softmax(skewed().double(), 0).numpy()[y].mean(1)
    result = evaluate(Fixed(skewed()), x, y, batch_size=batch_size)
    assert result.loss == pytest.approx(per_window.mean(), rel=1e-6)
    assert result.standard_error == pytest.approx(per_window.std(ddof=1) / math.sqrt(7), rel=1e-5)


def test_masked_targets_are_left_out(windows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = windows
    y[0, :9] = y[3, 2] = -1
    losses = -torch.log_softmax(skewed().double(), 0).numpy()[y]
    result = evaluate(Fixed(skewed()), x, y, np.ones(VOCAB, np.int32))
    assert result.tokens == 74
    assert result.loss == pytest.approx(losses[y != -1].mean(), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2), rel=1e-9)
    assert 0 < result.standard_error < 1


def test_the_standard_error_predicts_the_scatter() -> None:
    """Over many draws of windows, the mean loss scatters by about the standard error each draw reports."""
    rng = np.random.default_rng(1)
    draws = [rng.integers(0, VOCAB, (16, 12)) for _ in range(200)]
    results = [evaluate(Fixed(skewed()), y, y, batch_size=16) for y in draws]
    scatter = np.std([result.loss for result in results], ddof=1)
    assert np.mean([result.standard_error for result in results]) == pytest.approx(scatter, rel=0.15)


def test_the_loss_of_bfloat16_logits_is_that_of_the_same_logits_in_float32(
    windows: tuple[np.ndarray, np.ndarray],
) -> None:
    rounded = skewed().bfloat16().float()
    low = evaluate(Fixed(rounded, torch.bfloat16), *windows)
    assert low.loss == pytest.approx(evaluate(Fixed(rounded), *windows).loss, abs=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_evaluates_without_dropout_and_restores_the_mode(
    windows: tuple[np.ndarray, np.ndarray], training: bool
) -> None:
    model = Fixed(skewed()).train(training)
    random_state = torch.get_rng_state()
    assert evaluate(model, *windows).loss == evaluate(model, *windows).loss
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("training", [True, False])
def test_every_module_keeps_its_mode(windows: tuple[np.ndarray, np.ndarray], training: bool) -> None:
    """A part that its owner froze stays frozen, and a part that is training still has no dropout here."""
    model = nn.Sequential(Fixed(skewed())).train(training)
    model[0].drop.train(not training)
    assert evaluate(model, *windows).loss == evaluate(model, *windows).loss
    assert [m.training for m in model.modules()] == [training, training, not training]
    with pytest.raises(IndexError):
        evaluate(model, windows[0], np.full_like(windows[1], VOCAB))
    assert [m.training for m in model.modules()] == [training, training, not training]


def test_one_window_has_no_standard_error(windows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = windows
    assert math.isnan(evaluate(Fixed(skewed()), x[:1], y[:1]).standard_error)


def test_nothing_to_evaluate_is_refused(windows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = windows
    for inputs, targets in ((x[:0], y[:0]), (x, np.full_like(y, -1)), (x, y[:3])):
        with pytest.raises(ValueError, match="windows x"):
            evaluate(Fixed(skewed()), inputs, targets)
