"""The norms that schemes choose between, and the two ends of a normalised stream."""

from __future__ import annotations

import pytest
import torch
from builders import batch, build, random, rms

from spheret.connections.norms import Float32Norm, NormedStream, RMSNorm, build_norm


def test_norms_by_their_formulas() -> None:
    x = 3 * random(5, 8) + 1
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(build_norm("layernorm", 8, eps=1e-3).double()(x), expected)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(build_norm("rmsnorm", 8, eps=1e-3).double()(x), expected)
    assert build_norm("none", 8) is None


@pytest.mark.parametrize(
    ("kind", "bias", "count"), [("layernorm", True, 2), ("layernorm", False, 1), ("rmsnorm", False, 1)]
)
def test_parameters_of_a_norm(kind: str, bias: bool, count: int) -> None:
    assert len(list(build_norm(kind, 8, bias=bias).parameters())) == count


@pytest.mark.parametrize("kind", ["rmsnorm", "none"])
def test_a_bias_that_a_norm_does_not_have_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"bias = true: norm={kind} has no bias"):
        build_norm(kind, 8, bias=True)


def test_rms_norm_answers_in_the_dtype_of_its_input() -> None:
    x = random(4, 8).bfloat16()
    out = RMSNorm(8)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(rms(out), torch.ones(4, dtype=torch.float64), rtol=1e-2, atol=0)


def test_float32_norm_stays_float32_in_a_bfloat16_model() -> None:
    norm = Float32Norm("rmsnorm", 8).to(torch.bfloat16)
    assert norm(random(4, 8).bfloat16()).dtype == norm.norm.weight.dtype == torch.float32


def test_ends_of_a_stream() -> None:
    h = 5 * random(3, 8).float()
    both = NormedStream(8, entry="rmsnorm", final="layernorm")
    assert torch.equal(both.enter(h), both.entry_norm(h)) and torch.equal(both.exit(h), both.final_norm(h))
    neither = NormedStream(8)
    assert torch.equal(neither.enter(h), h) and torch.equal(neither.exit(h), h)


@pytest.mark.parametrize(
    ("scheme", "old"),
    [
        ("pre-ln:bias=true", {"final_norm": "norm"}),
        ("post-ln", {"entry_norm": "norm"}),
        ("gpt-qknorm", {"final_norm": "norm"}),
        ("peri-ln", {"entry_norm": "entry", "final_norm": "final"}),
        ("keel", {"final_norm": "final"}),
    ],
)
def test_weights_saved_under_the_names_of_before_can_be_loaded(scheme: str, old: dict[str, str]) -> None:
    model, other = build(scheme), build(scheme, seed=1)
    with torch.no_grad():
        for parameter in model.stream.parameters():
            parameter.normal_()
    saved = model.state_dict()
    for new, name in old.items():
        for key in [key for key in saved if key.startswith(f"stream.{new}.")]:
            saved[key.replace(new, name)] = saved.pop(key)
    assert saved.keys() != other.state_dict().keys()
    other.load_state_dict(saved)
    x, _ = batch()
    assert torch.equal(other(x)[0], model(x)[0])
