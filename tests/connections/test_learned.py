"""Learned scalars and vectors: where they start, how far a step moves them, and that they stay float32."""

from __future__ import annotations

import math

import pytest
import torch

from spheret.connections.learned import LearnedExponent, ScaledVector, StepSize
from spheret.connections.options import Scaling
from spheret.geometry import LOG_P_RANGE


@pytest.mark.parametrize("form", ["raw", "softplus"])
@pytest.mark.parametrize("start", [0.01, 0.5, 1.0, 30.0])
def test_step_starts_at_alpha_times_lambda_in_both_forms(form: str, start: float) -> None:
    step = StepSize(start, 0.5, form)
    assert step().item() == pytest.approx(0.5 * start, rel=1e-5)
    assert step.alpha().item() == pytest.approx(start, rel=1e-5)


def test_softplus_form_learns_the_argument_and_stays_positive() -> None:
    step = StepSize(1.0, 1.0, "softplus")
    assert step.weight.item() == pytest.approx(math.log(math.e - 1))
    with torch.no_grad():
        step.weight.fill_(-5.0)
    assert step().item() == pytest.approx(math.log1p(math.exp(-5)))
    raw = StepSize(0.0, 1.0)
    assert raw().item() == 0
    with torch.no_grad():
        raw.weight.fill_(-5.0)
    assert raw().item() == -5


@pytest.mark.parametrize(("far", "bound"), [(50.0, LOG_P_RANGE[1]), (-50.0, LOG_P_RANGE[0])])
def test_exponent_stays_in_its_range_and_can_come_back(far: float, bound: float) -> None:
    exponent = LearnedExponent()
    with torch.no_grad():
        exponent.log_p.fill_(far)
    p = exponent()
    assert p.item() == pytest.approx(math.exp(bound), rel=1e-4)
    p.sum().backward()
    assert exponent.log_p.grad.item() > 0


def test_a_stored_scale_moves_by_start_over_scale() -> None:
    vector = ScaledVector(4, Scaling(0.05, 0.25))
    assert torch.allclose(vector(), torch.full((4,), 0.05)) and torch.all(vector.weight == 0.25)
    optimizer = torch.optim.Adam(vector.parameters(), lr=0.01)
    vector().sum().backward()
    optimizer.step()  # Adam's first step is the learning rate itself
    torch.testing.assert_close(vector(), torch.full((4,), 0.05 - 0.01 * 0.05 / 0.25), rtol=1e-5, atol=0)


def test_rates_of_ngpt_are_never_negative_and_come_back() -> None:
    vector = ScaledVector(2, Scaling(0.05, 1.0), positive=True)
    with torch.no_grad():
        vector.weight.copy_(torch.tensor([-2.0, 2.0]))
    assert torch.allclose(vector(), torch.tensor([0.1, 0.1]))
    vector().sum().backward()
    assert torch.allclose(vector.weight.grad, torch.tensor([-0.05, 0.05]))
