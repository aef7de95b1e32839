"""GPT by itself: its configuration, loss, size, initial weights and number formats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spheret.connections import list_schemes
from spheret.models import GPT, GPTConfig

SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 61}
SCHEMES = list_schemes()


def build(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**SMALL | changes))


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# --- configuration ---


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
        GPTConfig(**SMALL | changes)


def test_context_longer_than_the_model() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"17 tokens do not fit block_size = 16: crop"):
        model(torch.zeros(1, 17, dtype=torch.long))
    assert model(torch.zeros(1, 16, dtype=torch.long))[0].shape == (1, 16, 61)
    assert model(torch.zeros(3, 1, dtype=torch.long))[0].shape == (3, 1, 61)


# --- loss ---


def test_loss_is_the_mean_cross_entropy() -> None:
    model = build()
    x, y = batch()
    logits, loss = model(x, y)
    total = 0.0
    for row, target in zip(logits.detach().reshape(-1, 61).double(), y.flatten(), strict=True):
        total += math.log(row.exp().sum().item()) - row[target].item()
    assert loss.item() == pytest.approx(total / y.numel(), rel=1e-5)
    assert model(x)[1] is None
    assert torch.equal(model(x)[0], logits)


def test_masked_targets_do_not_count() -> None:
    model = build()
    x, y = batch()
    masked = y.clone()
    masked[:, ::2] = -1
    masked[1] = -1
    logits, loss = model(x, masked)
    kept = masked.flatten() != -1
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 61)[kept], y.flatten()[kept])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.item() != pytest.approx(model(x, y)[1].item(), rel=1e-4)
    logits.retain_grad()
    loss.backward()
    assert (logits.grad[masked == -1] == 0).all()
    assert (logits.grad[masked != -1] != 0).any(-1).all()


def test_targets_may_be_a_view() -> None:
    model = build()
    tokens = torch.randint(61, (4, 17))
    loose = model(tokens[:, :-1], tokens[:, 1:])[1]
    assert torch.equal(loose, model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1])


# --- size ---


def test_gpt2_small_has_as_many_parameters_as_nanogpt_reports() -> None:
    """nanoGPT prints 123.59M for this shape without biases, position embeddings left out."""
    config = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, scheme="pre-ln")
    with torch.device("meta"):
        model = GPT(config)
    block = 12 * 768**2 + 2 * 768
    without_positions = 50304 * 768 + 12 * block + 768
    assert model.num_parameters(embeddings=False) == without_positions == 123_587_328
    assert model.num_parameters() == without_positions + 1024 * 768


def test_biases_are_counted() -> None:
    with_bias, without = build(bias=True, scheme="pre-ln:bias=true"), build()
    added = 2 * (3 * 32 + 32 + 4 * 32 + 32) + 5 * 32
    assert with_bias.num_parameters() - without.num_parameters() == added


# --- initial weights ---


def branch_scales(scheme: str, dim: int) -> list[float]:
    """Root mean square of every sublayer's output at initialisation, relative to that of its input, in order, averaged
    over seeds; 1 where the connection reads no more of an output than its direction."""
    scales = torch.zeros(4)
    for seed in range(3):
        model = build(seed, scheme=scheme, n_embd=dim, n_head=dim // 32, vocab_size=257, block_size=32)
        tokens = torch.randint(257, (8, 32))
        with torch.no_grad():
            h, found = model.embed(tokens), []
            for block in model.blocks:
                for _, branch, connection in block.sublayers():
                    x = connection.branch_input(h)
                    f = branch(x)
                    ratio = (f.square().mean() / x.square().mean()).sqrt()
                    direction_only = torch.allclose(connection(h, 2 * f), connection(h, f))
                    found.append(torch.ones(()) if direction_only else ratio)
                    h = connection(h, f)
        scales += torch.stack(found) / 3
    return scales.tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_initial_response_does_not_depend_on_the_width(scheme: str) -> None:
    by_width = [branch_scales(scheme, dim) for dim in (64, 128, 256, 512)]
    for sublayer in zip(*by_width, strict=True):
        assert max(sublayer) / min(sublayer) < 1.3, by_width


def test_nanogpt_init_does_depend_on_the_width() -> None:
    """The reason for the width-aware rule, and proof that the test above can fail."""

    def scale(dim: int) -> float:
        model = build(init="nanogpt", n_embd=dim)
        return model.blocks[0].attn.c_attn(torch.randn(64, dim)).std().item()

    assert scale(512) / scale(64) > 2


@pytest.mark.parametrize("scheme", ["pre-ln", "proj"])
def test_nanogpt_init_has_its_published_scales(scheme: str) -> None:
    model = build(init="nanogpt", scheme=scheme, n_layer=8, n_embd=128, vocab_size=257, block_size=64, bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "c_attn.weight", "c_fc.weight", "wte.weight", "wpe.weight")):
            expected = 0.02 / math.sqrt(2 * 8) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.1 * expected, name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name


def test_initial_weights_are_a_function_of_the_seed() -> None:
    first, same, other = build(7), build(7), build(8)
    for (name, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() == 2:
            assert not torch.equal(a, c), name


def test_reset_parameters_starts_over() -> None:
    model = build(scheme="spheret:p=learn", bias=True)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(9.0)
    torch.manual_seed(0)
    model.reset_parameters()
    fresh = build(scheme="spheret:p=learn", bias=True)
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert (p != 9.0).any(), name
        if p.dim() < 2:
            assert torch.equal(p, fresh.get_parameter(name)), name


# --- dropout and number formats ---


def test_dropout_acts_in_training_only() -> None:
    model, plain = build(dropout=0.3), build()
    plain.load_state_dict(model.state_dict())
    x, _ = batch()
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])
    torch.testing.assert_close(model(x)[0], plain(x)[0])


def test_dropout_reaches_embedding_attention_and_both_sublayers() -> None:
    model = build(dropout=0.5)
    x = torch.randn(2, 16, 32)
    block = model.blocks[0]
    for output in (model.embed(batch()[0]), block.attn(x), block.mlp(x)):
        assert abs((output == 0).float().mean().item() - 0.5) < 0.1
    block.attn.resid_dropout.p = 0.0
    assert not torch.equal(block.attn(x), block.attn(x))  # what remains acts on the attention weights


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float64(scheme: str) -> None:
    model = build(scheme=scheme)
    x, y = batch()
    logits, loss = model(x, y)
    wide, wide_loss = model.double()(x, y)
    assert wide.dtype == wide_loss.dtype == torch.float64
    torch.testing.assert_close(wide.float(), logits, rtol=1e-4, atol=1e-5)
    wide_loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    assert abs(wide_loss.item() - loss.item()) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16(scheme: str) -> None:
    model = build(scheme=scheme)
    x, y = batch()
    expected = model(x, y)[1].item()
    logits, loss = model.to(torch.bfloat16)(x, y)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert abs(loss.item() - expected) < 0.05
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_head_and_embedding_are_one_parameter() -> None:
    model = build()
    assert [name for name, p in model.named_parameters() if p.shape == (61, 32)] == ["wte.weight"]
    x, _ = batch()
    logits = model(x)[0]
    with torch.no_grad():
        model.wte.weight[60] = 0  # a token that is not read: only its logit can change
    unread = ~(x == 60).any(-1)
    assert unread.any()
    assert (model(x)[0][unread][..., 60] == 0).all()
    assert torch.equal(model(x)[0][unread][..., :60], logits[unread][..., :60])
