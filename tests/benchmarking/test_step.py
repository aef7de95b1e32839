"""The record that the benchmark returns, never how fast anything is."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch

from spheret.benchmarking.measuring import balanced_order
from spheret.benchmarking.nanogpt import NanoGPT, configure_adamw
from spheret.benchmarking.step import BASELINE, SAME_OPTIMIZER, StepBench, batch, bench_step, build_variants
from spheret.connections import canonical_name
from spheret.models import GPT, GPTConfig

from .conftest import TINY

CPU = torch.device("cpu")
# nanoGPT's names on the left, ours on the right.
NAMES = {
    "wte": "wte",
    "wpe": "wpe",
    "ln_f": "stream.final_norm",
    "ln_1": "attn_connection.norm",
    "ln_2": "mlp_connection.norm",
    "attn.c_attn": "attn.c_attn",
    "attn.c_proj": "attn.c_proj",
    "mlp.c_fc": "mlp.c_fc",
    "mlp.c_proj": "mlp.c_proj",
}


def our_name(name: str) -> str:
    """``h.1.attn.c_proj.weight`` -> ``blocks.1.attn.c_proj.weight``."""
    path = name.removesuffix(".weight")
    if not path.startswith("h."):
        return f"{NAMES[path]}.weight"
    _, layer, rest = path.split(".", 2)
    return f"blocks.{layer}.{NAMES[rest]}.weight"


def same_weights() -> tuple[NanoGPT, GPT]:
    torch.manual_seed(1)
    config = GPTConfig(n_layer=3, n_head=4, n_embd=32, block_size=16, vocab_size=61, scheme="pre-ln")
    theirs, ours = NanoGPT(config), GPT(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, parameter in theirs.named_parameters():
            ours.get_parameter(our_name(name)).copy_(parameter)
    return theirs, ours


def test_nanogpt_is_our_pre_ln_gpt() -> None:
    theirs, ours = same_weights()
    assert {our_name(name) for name, _ in theirs.named_parameters()} == {name for name, _ in ours.named_parameters()}
    tokens = torch.randint(61, (3, 17))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, :5] = -1
    their_logits, their_loss = theirs(x, y.contiguous())
    our_logits, our_loss = ours(x, y)
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-6, atol=1e-6)
    their_loss.backward()
    our_loss.backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(our_name(name)).grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_nanogpt_starts_with_its_published_scales() -> None:
    torch.manual_seed(0)
    model = NanoGPT(GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=257))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones(128)), name
        else:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
    decayed = configure_adamw(model, lr=1e-3).param_groups[0]
    assert decayed["weight_decay"] == 0.1 and decayed["betas"] == (0.9, 0.95)
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters() if p.dim() == 2}


def test_record_is_complete_and_strict_json(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["settings"]["n_embd"] == 16 and result["settings"]["dtype"] == "float32"
    assert result["settings"]["compile"] is False and result["settings"]["device"] == "cpu"
    assert result["environment"]["machine"]["threads"] == torch.get_num_threads()
    assert result["environment"]["versions"]["torch"] == torch.__version__
    names = [v["variant"] for v in result["variants"]]
    assert names == [BASELINE, SAME_OPTIMIZER, "pre-ln", "proj", "spheret:p=learn"]
    for v in result["variants"]:
        assert len(v["seconds"]) == len(v["ratios"]) == 3
        assert 0 < v["p10_s"] <= v["median_s"] <= v["p90_s"]
        assert v["tokens_per_s"] == pytest.approx(2 * 8 / v["median_s"])
        assert v["peak_bytes"] > 0
    first = result["variants"][0]
    for v in result["variants"]:
        assert v["ratios"] == [own / base for own, base in zip(v["seconds"], first["seconds"], strict=True)]
        assert v["ratio"] == pytest.approx(sorted(v["ratios"])[1])


def test_a_variant_to_itself_is_one(result: dict[str, Any]) -> None:
    first = result["variants"][0]
    assert result["baseline"] == first["variant"] == BASELINE
    assert first["ratios"] == [1.0] * 3
    assert (first["ratio_p10"], first["ratio"], first["ratio_p90"]) == (1.0, 1.0, 1.0)


def test_variants_take_turns(result: dict[str, Any], samples: list[tuple[str, int]]) -> None:
    names = [v["variant"] for v in result["variants"]]
    assert samples == [(name, number) for number in range(3) for name in balanced_order(names, number)]


def test_parameters_are_counted_once(result: dict[str, Any]) -> None:
    parameters = {v["variant"]: v["parameters"] for v in result["variants"]}
    assert (
        parameters[BASELINE]
        == parameters[SAME_OPTIMIZER]
        == parameters["pre-ln"]
        == 31 * 16 + 8 * 16 + 5 * 16 + 24 * 256
    )
    assert parameters["spheret:p=learn"] == parameters["proj"] + 1


def test_every_variant_learns_from_the_same_batches() -> None:
    config = StepBench(schemes=("proj",), **TINY)
    x, y = batch(config, 0, CPU)
    assert x.shape == y.shape == (2, 8) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(batch(config, 0, CPU)[0], x) and not torch.equal(batch(config, 1, CPU)[0], x)
    for variant in build_variants(config, CPU):
        before = [p.detach().clone() for p in variant.model.parameters()]
        variant.step(x, y, torch.autocast("cpu", enabled=False))
        changed = [not torch.equal(a, b) for a, b in zip(before, variant.model.parameters(), strict=True)]
        assert all(changed), variant.name
        assert all(p.grad is None for p in variant.model.parameters())


def test_only_the_optimizer_differs_between_the_nanogpt_variants() -> None:
    config = StepBench(schemes=(), **TINY)
    plain, ours = build_variants(config, CPU)
    x, y = batch(config, 0, CPU)
    for variant in (plain, ours):
        variant.step(x, y, torch.autocast("cpu", enabled=False))
    for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert ours.optimizer.param_groups[0]["fused"] and not plain.optimizer.param_groups[0]["fused"]


def test_bfloat16_autocast_and_garbage_collection_come_back() -> None:
    result = bench_step(StepBench(schemes=("proj",), **TINY | {"dtype": "bfloat16", "rounds": 1}))
    assert result["settings"]["dtype"] == "bfloat16"
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("cxx_compiler")
def test_compiled_models_run_as_one_graph_each() -> None:
    result = bench_step(StepBench(schemes=("proj",), **TINY | {"compile": True, "rounds": 1, "n_layer": 1}))
    assert result["settings"]["compile"] is True
    assert len(result["variants"]) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"warmup": 0}, "warmup = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"dtype": "int8"}, "int8"),
        ({"n_embd": 15}, "n_embd = 15"),
        ({"schemes": ("proj", "spheret:p=1")}, "proj is given twice"),
        ({"schemes": ("no-such",)}, "no-such"),
    ],
)
def test_errors_name_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepBench(**TINY | changes)


def test_schemes_appear_under_their_canonical_names() -> None:
    names = [v.name for v in build_variants(StepBench(schemes=("spheret:p=2",), **TINY), CPU)]
    assert names[2:] == [canonical_name("spheret:p=2")] == ["cay"]
