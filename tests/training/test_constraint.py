"""Weight constraints through training: in every checkpoint; what else of a run belongs to a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from spheret.data import Dataset
from spheret.training import TrainConfig, checkpoints, load_model, train
from spheret.training.settings import RunSettings, default_lr, scheme_lr

SCHEMES = ["ngpt", "angpt"]


def violation(scheme: str, weights: dict[str, Tensor]) -> float:
    """Largest distance of a row (of nGPT's last maps: a column) from what the scheme promises of its norm."""
    worst = 0.0
    for name, weight in weights.items():
        if weight.dim() == 2:
            norms = weight.square().sum(0 if scheme == "ngpt" and "c_proj" in name else 1).sqrt()
            worst = max(worst, ((norms - 1).abs() if scheme == "ngpt" else norms - 1).max().item())
    return worst


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_constraint_holds_in_every_checkpoint(
    scheme: str, tiny: Callable[..., TrainConfig], dataset: Dataset, tmp_path: Path
) -> None:
    config = tiny(scheme=scheme, lr=0.05, weight_decay=0.0, warmup_ratio=0.0, checkpoint_interval=2, keep_checkpoints=0)
    result = train(config, tmp_path / "run", dataset=dataset)
    assert result.val_loss is not None
    saved = checkpoints(tmp_path / "run")
    assert len(saved) == 3
    for folder in saved:
        assert violation(scheme, safetensors.torch.load_file(folder / "model.safetensors")) < 1e-5
    model = load_model(tmp_path / "run")
    assert violation(scheme, dict(model.named_parameters())) < 1e-5
    torch.manual_seed(config.seed)
    start = type(model)(config.model)
    assert (start.wte.weight - model.wte.weight).abs().max() > 0.05  # there was something to hold


# --- settings that belong to the method ---


def test_a_method_s_own_decay_and_warmup_are_defaults() -> None:
    settings = RunSettings(steps=100)
    decays = {s: settings.train_config(s, lr=1e-3, seed=1, vocab_size=9) for s in ("pre-ln", "gpt-qknorm", *SCHEMES)}
    assert {s: (c.weight_decay, c.total_warmup_steps) for s, c in decays.items()} == {
        "pre-ln": (0.1, 10),
        "gpt-qknorm": (0.1, 10),
        "ngpt": (0.0, 0),
        "angpt": (0.0, 0),
    }
    given = dataclasses.replace(settings, weight_decay=0.05, warmup_steps=20)
    for scheme in decays:
        config = given.train_config(scheme, lr=1e-3, seed=1, vocab_size=9)
        assert (config.weight_decay, config.total_warmup_steps) == (0.05, 20)


def test_learning_rates_have_the_scheme_s_factor() -> None:
    shape = {"n_embd": 100, "n_layer": 6}
    assert scheme_lr("pre-ln", **shape) == default_lr(100) == 0.004
    assert scheme_lr("ngpt", **shape) == scheme_lr("ngpt:alpha=0.02", **shape) == 0.024
    assert [scheme_lr("angpt", n_embd=100, n_layer=n) for n in (2, 6, 24)] == [0.016, 0.008, 0.002]
