"""The settings that all commands share: one set of defaults, checked together, and typed again as flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from spheret.data import DataConfig
from spheret.models import GPTConfig
from spheret.training import TrainConfig
from spheret.training.settings import RunSettings, default_lr, flags, scheme_lr

SCHEMES = ["ngpt", "angpt"]


def test_the_settings_of_every_command_have_the_same_defaults() -> None:
    own = TrainConfig()
    run = RunSettings().train_config(
        own.model.scheme,
        lr=scheme_lr(own.model.scheme, n_embd=own.model.n_embd, n_layer=own.model.n_layer),
        seed=own.seed,
        vocab_size=own.model.vocab_size,
    )
    # The bounds belong to the scheme; a TrainConfig built in Python has none, and neither has a run of format 1.
    assert dataclasses.replace(run, qkv_lr=0.0, mlp_out_lr=0.0) == own


def test_every_setting_of_a_run_is_a_flag() -> None:
    """Of `train` and `compare` alike, except what each sets itself and what is a setting in Python alone."""
    offered = {field.name for field in dataclasses.fields(RunSettings)}
    own = {"model", "lr", "seed", "init_from", "scheme", "vocab_size", "cache"}
    python_only = {"max_train_tokens", "save_final", "on_divergence", "bias", "rope_base", "folded", "split_seed"}
    for kind in (TrainConfig, GPTConfig, DataConfig):
        missing = {field.name for field in dataclasses.fields(kind)} - offered
        assert missing <= own | python_only, kind


def test_warmup_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps = 5 and warmup_ratio = 0\.1 say the same thing twice"):
        RunSettings(warmup_steps=5, warmup_ratio=0.1).train_config("pre-ln", lr=1e-3, seed=1, vocab_size=1)


def test_vocabulary_is_padded() -> None:
    def rows(multiple: int) -> int:
        settings = RunSettings(vocab_multiple=multiple)
        return settings.train_config("proj", lr=1e-3, seed=1, vocab_size=50257).model.vocab_size

    assert [rows(m) for m in (1, 64, 50257, 50000)] == [50257, 50304, 50257, 100000]
    with pytest.raises(ValueError, match="vocab_multiple = 0"):
        rows(0)


def test_flags_are_what_differs_and_what_is_always_named() -> None:
    assert flags(RunSettings()) == []
    settings = RunSettings(data=("a", "b c"), weight_decay=1 / 3, warmup_steps=20)
    assert flags(settings, always=("n_layer",), never=("data",)) == [
        *("--n-layer", "6", "--warmup-steps", "20", "--weight-decay", repr(1 / 3)),
    ]


@pytest.mark.parametrize(("n_embd", "lr"), [(128, 0.0063), (768, 0.001), (1280, 0.00063)])
def test_the_learning_rate_follows_the_width(n_embd: int, lr: float) -> None:
    assert default_lr(n_embd) == lr


def test_defaults_named_in_the_help_are_the_defaults() -> None:
    text = Path(flags.__code__.co_filename).read_text(encoding="utf-8")
    assert f"else a ratio of {TrainConfig.warmup_ratio:g}." in text
    assert f"what the scheme sets, else {TrainConfig.weight_decay:g}." in text


def test_a_scheme_s_own_decay_and_warmup_are_defaults() -> None:
    settings = RunSettings(steps=100)
    decays = {s: settings.train_config(s, lr=1e-3, seed=1, vocab_size=9) for s in ("pre-ln", "gpt-qknorm", *SCHEMES)}
    assert {s: (c.weight_decay, c.total_warmup_steps) for s, c in decays.items()} == {
        "pre-ln": (0.1, 10),
        "gpt-qknorm": (0.1, 10),
        "ngpt": (0.0, 0),
        "angpt": (0.0, 0),
    }
    d = settings.n_embd
    bounds = {s: (d * c.qkv_lr, d * c.mlp_out_lr) for s, c in decays.items()}
    assert bounds == {"pre-ln": (0.2, 0), "gpt-qknorm": (0, 0), "ngpt": (0, 0), "angpt": (0, 0)}
    for lr, slowed in ((0.1, 1.0), (0.4, 1.0), (1.6, 0.25), (6.4, 0.0625)):
        sphere = settings.train_config("proj", lr=lr / d, seed=1, vocab_size=257)
        assert sphere.lr_factors == pytest.approx({"qkv": slowed, "mlp-out": slowed}), "at most 0.4 over the width"
    given = dataclasses.replace(settings, qkv_lr=0.0, mlp_out_lr=1e-4)
    asked = given.train_config("proj", lr=1e-3, seed=1, vocab_size=257)
    assert asked.lr_factors == pytest.approx({"qkv": 1.0, "mlp-out": 0.1})
    given = dataclasses.replace(settings, weight_decay=0.05, warmup_steps=20)
    for scheme in decays:
        config = given.train_config(scheme, lr=1e-3, seed=1, vocab_size=9)
        assert (config.weight_decay, config.total_warmup_steps) == (0.05, 20)


def test_learning_rates_have_the_scheme_s_factor() -> None:
    shape = {"n_embd": 100, "n_layer": 6}
    assert scheme_lr("pre-ln", **shape) == default_lr(100) == 0.008
    assert scheme_lr("gpt-qknorm", **shape) == 0.004 and scheme_lr("spheret", **shape) == 0.016
    assert scheme_lr("proj:preset=paper", **shape) == scheme_lr("proj:decay=inv-sqrt", **shape) == 0.008
    assert scheme_lr("ngpt", **shape) == scheme_lr("ngpt:alpha=0.02", **shape) == 0.024
    assert [scheme_lr("angpt", n_embd=100, n_layer=n) for n in (2, 6, 24)] == [0.016, 0.008, 0.002]
