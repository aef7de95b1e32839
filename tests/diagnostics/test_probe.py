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
