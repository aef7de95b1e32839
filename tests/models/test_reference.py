"""Our GPT with ``pre-ln`` is GPT-2: the same logits and gradients as the transformers library from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import batch, build

from spheret.models import GPT

transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT, LAYERS, WIDTH = 97, 32, 3, 64


def names(bias: bool) -> dict[str, tuple[str, bool]]:
    """Our parameter -> its name in transformers, and whether it is stored transposed there (Conv1D is (in, out))."""
    mapping = {"wte.weight": ("wte.weight", False), "wpe.weight": ("wpe.weight", False)}
    mapping["stream.final_norm.weight"] = ("ln_f.weight", False)
    for i in range(LAYERS):
        ours, theirs = f"blocks.{i}.", f"h.{i}."
        for norm, ln in (("attn_connection.norm", "ln_1"), ("mlp_connection.norm", "ln_2")):
            mapping[f"{ours}{norm}.weight"] = (f"{theirs}{ln}.weight", False)
        for linear in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            mapping[f"{ours}{linear}.weight"] = (f"{theirs}{linear}.weight", True)
    if bias:
        weights = [name for name in mapping if name not in ("wte.weight", "wpe.weight")]
        mapping |= {_bias(name): (_bias(mapping[name][0]), False) for name in weights}
    return mapping


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def pair(bias: bool) -> tuple[GPT, Any]:
    """Both models in evaluation mode with the same weights, gains and biases away from their initial ones and zeros."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_head=4,
        n_embd=WIDTH,
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        activation_function="gelu",
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    shape = {"n_layer": LAYERS, "n_head": 4, "n_embd": WIDTH, "vocab_size": VOCAB, "block_size": CONTEXT}
    ours = build(f"pre-ln:bias={str(bias).lower()}", bias=bias, **shape).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias") and not bias:
                parameter.zero_()
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, (source, transposed) in names(bias).items():
            weight = theirs.transformer.get_parameter(source)
            ours.get_parameter(name).copy_(weight.T if transposed else weight)
    return ours, theirs


X, Y = batch(3, CONTEXT, VOCAB, seed=5)


@pytest.mark.parametrize("bias", [True, False])
def test_mapping_names_every_parameter_of_both(bias: bool) -> None:
    ours, theirs = pair(bias)
    assert set(names(bias)) == {name for name, _ in ours.named_parameters()}
    wanted = {name for name, _ in theirs.transformer.named_parameters() if bias or not name.endswith("bias")}
    assert {source for source, _ in names(bias).values()} == wanted


@pytest.mark.parametrize("bias", [True, False])
def test_logits_equal_transformers(bias: bool) -> None:
    ours, theirs = pair(bias)
    with torch.no_grad():
        logits, expected = ours(X)[0], theirs(X).logits
    assert expected.std() > 0.5  # the comparison has something to compare
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_biases_and_gains_matter_in_the_comparison() -> None:
    ours, theirs = pair(bias=True)
    with torch.no_grad():
        expected = theirs(X).logits
        for name in ("blocks.1.attn.c_attn.bias", "blocks.2.mlp_connection.norm.bias", "stream.final_norm.weight"):
            kept = ours.get_parameter(name).clone()
            ours.get_parameter(name).copy_(torch.zeros_like(kept))
            assert (ours(X)[0] - expected).abs().max() > 1e-2, name
            ours.get_parameter(name).copy_(kept)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_transformers(bias: bool) -> None:
    ours, theirs = pair(bias)
    ours, theirs = ours.double(), theirs.double()
    _, loss = ours(X, Y)
    expected = torch.nn.functional.cross_entropy(theirs(X).logits.flatten(0, 1), Y.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    for name, (source, transposed) in names(bias).items():
        gradient, wanted = ours.get_parameter(name).grad, theirs.transformer.get_parameter(source).grad
        wanted = wanted.T if transposed else wanted
        assert wanted.abs().max() > 0, name
        torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-10)
