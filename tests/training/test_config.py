from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spheret.connections import canonical_name
from spheret.training import TrainConfig, config_from_dict, config_to_dict

Tiny = Callable[..., TrainConfig]


def test_numpy_numbers_are_written_as_numbers(tiny: Tiny) -> None:
    config = tiny(
        lr=np.float32(0.5),
        steps=np.int64(6),
        seed=np.uint8(3),
        warmup_ratio=np.float64(0.25),
        save_final=np.bool_(True),
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, n_embd=np.int64(32), dropout=np.float32(0.5)),
        data=dataclasses.replace(config.data, val_fraction=np.float32(0.25), split_seed=np.int16(1)),
    )
    written = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(written) == config
    assert (written["lr"], written["steps"], written["seed"], written["save_final"]) == (0.5, 6, 3, True)
    assert (written["model"]["n_embd"], written["data"]["val_fraction"], written["data"]["split_seed"]) == (32, 0.25, 1)


def test_json_and_back(tiny: Tiny) -> None:
    config = tiny(scheme="spheret:p=0.5", dropout=0.1, lr=1e-3, schedule="wsd", warmup_steps=3)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_what_is_left_out_takes_its_default() -> None:
    config = config_from_dict({"lr": 0.01, "model": {"n_layer": 3}})
    assert (config.lr, config.model.n_layer) == (0.01, 3)
    assert config.steps == TrainConfig().steps


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"model": {"depth": 3}}, r"model\.depth"),
        ({"data": {"corpus": "x"}}, r"data\.corpus"),
    ],
)
def test_unknown_keys_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"unknown configuration keys {named};"):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0 .* use 1 or more"),
        ({"lr": 0.0}, "lr=0.0 must be positive"),
        ({"lr": float("nan")}, "lr=nan must be positive"),
        ({"beta2": 1.0}, "beta2=1.0 must be below 1"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5 .* use 1 or less"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 .* use 0 or more"),
        ({"schedule": "linear"}, "schedule='linear' .* use cosine, wsd, constant"),
        ({"dtype": "float16"}, "dtype='float16' .* gradient scaler"),
        ({"compile": True}, "compile=True .* use auto, on, off"),
        ({"on_divergence": "ask"}, "on_divergence='ask'"),
        ({"grad_accum": 5}, "grad_accum=5 .* batch_size=4"),
        ({"warmup_steps": 6}, "warmup_steps=6 leaves no step .* 6 steps"),
        ({"warmup_ratio": 1.0}, "warmup_ratio=1.0 leaves no step .* lower warmup_ratio"),
        ({"warmup_ratio": 20}, "warmup_ratio=20 .* use 1 or less"),
        ({"warmup_steps": -1}, "warmup_steps=-1 .* use 0 or more"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5 .* use warmup_ratio"),
        ({"max_train_tokens": 100}, "max_train_tokens=100 .* 128 tokens"),
    ],
)
def test_a_bad_value_is_named_with_its_fix(tiny: Tiny, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_warmup_is_a_share_or_a_number_of_steps(tiny: Tiny) -> None:
    assert tiny(steps=200, warmup_ratio=0.05).total_warmup_steps == 10
    assert tiny(steps=200, warmup_steps=20).total_warmup_steps == 20
    assert tiny(steps=200, warmup_steps=0, warmup_ratio=0.05).total_warmup_steps == 0


@pytest.mark.parametrize(("warmup", "steps"), [(0.05, 10), (0.0, 0), (20.0, 20), (1.0, 1)])
def test_a_configuration_of_before_has_one_warmup_for_both(tiny: Tiny, warmup: float, steps: int) -> None:
    values = config_to_dict(tiny(steps=200)) | {"warmup": warmup}
    del values["warmup_steps"], values["warmup_ratio"]
    assert config_from_dict(values).total_warmup_steps == steps
    with pytest.raises(ValueError, match=r"warmup=2\.5: use warmup_steps"):
        config_from_dict(values | {"warmup": 2.5})


def test_a_token_bound_lowers_the_steps_and_ends_the_decay_there(tiny: Tiny) -> None:
    config = tiny(steps=100, max_train_tokens=10 * 128 + 5, warmup_ratio=0)
    assert config.tokens_per_step == 128
    assert config.total_steps == 10
    assert config.lr_at(9) == config.min_lr_ratio * config.lr
    assert dataclasses.replace(config, max_train_tokens=10**9).total_steps == 100


@pytest.mark.parametrize(
    ("stored", "today"),
    [
        ("pre-ln", "pre-ln"),
        ("proj", "proj:alpha=0.5,alpha-lr=1,decay=inv-sqrt,head-input=state"),
        ("spheret:p=0.5,alpha=1", "spheret:p=0.5,alpha=1,alpha-lr=1,decay=inv-sqrt,head-input=state"),
        ("spheret", "proj:alpha=0.5,alpha-lr=1,decay=inv-sqrt,head-input=state"),
        ("geonorm:decay=none", "geonorm:alpha=0.5,alpha-lr=1,head-input=state"),
        ("spheret:p=learn", "spheret:p=learn,p-start=1,alpha=0.5,alpha-lr=1,decay=inv-sqrt,head-input=state"),
        ("cay:preset=paper", "cay:preset=paper"),
    ],
)
def test_a_run_of_format_1_keeps_the_defaults_that_it_was_trained_with(stored: str, today: str) -> None:
    values = config_to_dict(TrainConfig()) | {"model": {"n_layer": 16, "n_head": 2, "n_embd": 16, "scheme": stored}}
    for name in ("format", "qkv_lr", "mlp_out_lr"):
        values.pop(name)
    config = config_from_dict(values)
    assert config.model.scheme == canonical_name(today)
    assert config.lr_factors == {"qkv": 1, "mlp-out": 1}
    assert config_from_dict(config_to_dict(config)) == config


def test_the_factors_of_format_2_are_read_as_bounds() -> None:
    own = TrainConfig(lr=0.0125)
    values = config_to_dict(own) | {"format": 2, "qkv_lr": 0.25, "mlp_out_lr": 1.0}
    config = config_from_dict(values)
    assert (config.qkv_lr, config.mlp_out_lr) == (0.003125, 0.0)
    assert config.lr_factors == {"qkv": 0.25, "mlp-out": 1.0}
    with pytest.raises(ValueError, match="qkv_lr=2 of format 2"):
        config_from_dict(values | {"qkv_lr": 2})


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format=4 is not known"):
        config_from_dict(config_to_dict(TrainConfig()) | {"format": 4})
