"""What else of a run belongs to a method: its own weight decay, warm-up and learning rate."""

from __future__ import annotations

import dataclasses

from spheret.training.settings import RunSettings, default_lr, scheme_lr

SCHEMES = ["ngpt", "angpt"]


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
