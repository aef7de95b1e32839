"""The probe leaves the model as it found it."""

from __future__ import annotations

import pytest
import torch
from builders import batch, build

from spheret.diagnostics import probe


@pytest.mark.parametrize("training", [True, False])
def test_every_module_keeps_its_mode(training: bool) -> None:
    model = build("proj", dropout=0.5).train(training)
    model.blocks[0].train(not training)
    model.blocks[1].attn.resid_dropout.train(not training)
    before = {name: module.training for name, module in model.named_modules()}
    assert probe(model, batch()[0]) == probe(model, batch()[0])  # no dropout, whatever the modes
    assert {name: module.training for name, module in model.named_modules()} == before


def test_the_modes_survive_an_error() -> None:
    model = build("proj").train()
    model.blocks[0].eval()
    with pytest.raises(ValueError, match="tokens do not fit"):
        probe(model, torch.zeros(1, 17, dtype=torch.long))
    assert model.training and not model.blocks[0].training


@pytest.mark.parametrize("p", [0.1, 1.0, 2.0])
def test_the_saturation_of_a_sphere_is_its_angle_over_the_largest_that_p_allows(p: float) -> None:
    measured = probe(build(f"spheret:p={p},alpha=3"), batch()[0])
    largest = p * 90  # degrees; up to p = 2 no angle passes 180
    for saturation, angle in zip(measured["saturation"], measured["angle_deg"], strict=True):
        assert saturation == pytest.approx(angle / largest, rel=1e-4)
    assert 0.1 < max(measured["saturation"]) < 1


def test_a_sphere_tells_its_step_and_exponent() -> None:
    model = build("spheret:p=learn-per-layer,p-start=0.5,alpha=0.25,decay=inv-sqrt")
    with torch.no_grad():
        model.blocks[1].mlp_connection.step.weight.fill_(0.75)
    measured = probe(model, batch()[0])
    assert measured["alpha"] == pytest.approx([0.25, 0.25, 0.25, 0.75, 0.25, 0.25])
    assert measured["step_size"] == pytest.approx(
        [a * lam**-0.5 for a, lam in zip(measured["alpha"], [1, 1, 2, 2, 3, 3], strict=True)]
    )
    assert measured["p"] == pytest.approx([0.5] * 6)
    assert "p" not in probe(build("pre-ln"), batch()[0])


def test_the_exponential_map_never_saturates() -> None:
    measured = probe(build("geonorm"), batch()[0])
    assert measured["saturation"] == [0.0] * 6 and measured["p"] == [float("inf")] * 6
