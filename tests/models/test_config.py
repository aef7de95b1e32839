"""The shape of a GPT: what a configuration may choose, and what a scheme asks for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from builders import TINY, build_tiny

from spheret.connections import parse_scheme
from spheret.connections.options import TrainingDefaults
from spheret.models import GPT, GPTConfig

WHOLE = ["gpt-qknorm", "ngpt", "angpt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 0}, "n_layer = 0"),
        ({"n_head": 0}, "n_head = 0"),
        ({"n_embd": -8}, "n_embd = -8"),
        ({"block_size": 0}, "block_size = 0"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"n_embd": 30, "n_head": 4}, r"n_embd = 30 is not a multiple of n_head = 4"),
        ({"dropout": 1.0}, r"dropout = 1\.0: .*\[0, 1\)"),
        ({"dropout": -0.1}, r"dropout = -0\.1"),
        ({"dropout": math.nan}, "dropout = nan"),
        ({"init": "xavier"}, "'xavier': choose auto or nanogpt"),
        ({"scheme": "pre-layernorm"}, "'pre-layernorm': choose one of pre-ln"),
        ({"scheme": "spheret:p=-1"}, "p = -1"),
    ],
)
def test_config_errors_name_the_value_and_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**TINY | changes)


def test_the_old_name_of_the_scheme_is_refused() -> None:
    with pytest.raises(TypeError, match="connection"):
        GPTConfig(**TINY, connection="proj")  # type: ignore[call-arg]


def test_numpy_numbers_become_pythons() -> None:
    """A sweep over np.arange or np.geomspace gives these; JSON and checkpoints know neither."""
    config = GPTConfig(
        n_layer=np.int64(2), n_head=np.int32(2), n_embd=np.uint16(16), dropout=np.float32(0.5), bias=np.bool_(True)
    )
    assert config == GPTConfig(n_layer=2, n_head=2, n_embd=16, dropout=0.5, bias=True)
    plain = {int, float, bool, str}
    assert {type(getattr(config, field.name)) for field in dataclasses.fields(config)} <= plain


def names(model: GPT) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "sin"}, "positions = 'sin': choose one of auto, learned, rope"),
        ({"mlp": "relu"}, "mlp = 'relu': choose one of auto, gelu, swiglu"),
        ({"qk_norm": "ln"}, "qk_norm = 'ln': choose one of auto, none, l2, rms"),
        ({"head": "shared"}, "head = 'shared': choose one of auto, tied, untied"),
        ({"rope_base": 1.0}, r"rope_base = 1\.0"),
        ({"scheme": "ngpt", "mlp": "gelu"}, "mlp = 'gelu' does not go with scheme ngpt, which is built on swiglu"),
        ({"scheme": "angpt", "positions": "learned"}, "positions = 'learned' does not go with scheme angpt"),
        ({"scheme": "ngpt:alpha=0"}, "start = 0 never moves"),
        ({"scheme": "ngpt:qk-scale=0"}, "scale = 0 never moves"),
    ],
    ids=str,
)
def test_errors_name_the_value_and_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tiny(**changes)


def test_choices_that_say_what_the_scheme_wants_change_nothing() -> None:
    plain = build_tiny()
    same = build_tiny(positions="learned", mlp="gelu", qk_norm="none", head="tied")
    idx = torch.randint(11, (2, 8))
    assert torch.equal(plain(idx)[0], same(idx)[0])


@pytest.mark.parametrize("scheme", ["pre-ln", "proj", "post-ln"])
def test_every_connection_takes_every_model(scheme: str) -> None:
    model = build_tiny(scheme=scheme, positions="rope", mlp="swiglu", qk_norm="rms", head="untied")
    wanted = {"lm_head.weight", "blocks.0.attn.q_norm.weight", "blocks.1.attn.k_norm.weight"}
    assert wanted <= names(model) and "wpe.weight" not in names(model)
    assert model.blocks[0].mlp.c_fc.weight.shape == (8 * 16, 16)
    _, loss = model(torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("scheme", WHOLE)
def test_whole_models_may_be_tied_and_normalised_otherwise(scheme: str) -> None:
    tied = build_tiny(scheme=scheme, head="tied")
    assert "lm_head.weight" not in names(tied)
    named_in_the_scheme = build_tiny(scheme=f"{scheme}:head=tied")
    assert names(named_in_the_scheme) == names(tied)


@pytest.mark.parametrize("scheme", WHOLE)
def test_dropout_and_biases(scheme: str) -> None:
    model = build_tiny(scheme=scheme, dropout=0.2, bias=True)
    idx = torch.randint(11, (2, 8))
    assert not torch.equal(model(idx)[0], model(idx)[0])
    model.eval()
    assert torch.equal(model(idx)[0], model(idx)[0])


def test_rms_and_l2_norms_agree_where_their_gains_are_one() -> None:
    """RMS-normalised heads have norm sqrt(d_h): <q, k> / sqrt(d_h) is sqrt(d_h) times the cosine, as for l2."""
    rms, l2 = build_tiny(qk_norm="rms").double(), build_tiny(qk_norm="l2").double()
    l2.load_state_dict(rms.state_dict() | {k: v for k, v in l2.state_dict().items() if "qk_scale" in k}, strict=False)
    idx = torch.randint(11, (2, 8))
    torch.testing.assert_close(rms(idx)[0], l2(idx)[0], rtol=0, atol=1e-5)


def test_queries_without_a_direction_have_finite_gradients() -> None:
    model = build_tiny(scheme="ngpt")
    with torch.no_grad():
        model.blocks[0].attn.c_attn.weight[:16].zero_()
    _, loss = model(torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_parameters_of_the_whole_models() -> None:
    d, v, layers = 16, 11, 2
    weights = 2 * v * d + layers * 16 * d * d
    assert build_tiny(scheme="gpt-qknorm").num_parameters() == weights + layers * (2 * d + 2 * d // 2) + d
    assert build_tiny(scheme="ngpt").num_parameters() == weights + layers * (2 * d + d + 8 * d) + v
    assert build_tiny(scheme="angpt").num_parameters() == weights + layers * (2 * d + 2 * d // 2) + v


def test_a_scheme_that_is_only_a_connection_leaves_the_model_as_it_is() -> None:
    for name in ("pre-ln", "proj"):
        scheme = parse_scheme(name)
        assert scheme.model_options(16, 8) == parse_scheme("post-ln").model_options(64, 32)
        assert scheme.training(6) == (
            TrainingDefaults(lr_factor=2.0, qkv_lr=0.4, mlp_out_lr=0.4) if name == "proj" else TrainingDefaults()
        )
