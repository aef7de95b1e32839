from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from spheret.models import GPT, GPTConfig
from spheret.training.accumulate import accumulate_gradients, clip_gradients

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
