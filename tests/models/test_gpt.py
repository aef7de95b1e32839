"""GPT by itself: its loss, size, dropout and number formats."""

from __future__ import annotations

import math

import pytest
import torch
from builders import batch, build

from spheret.connections import list_schemes
from spheret.models import GPT, GPTConfig

SCHEMES = list_schemes()


def test_context_longer_than_the_model() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"17 tokens do not fit block_size = 16: crop"):
        model(torch.zeros(1, 17, dtype=torch.long))
    assert model(torch.zeros(1, 16, dtype=torch.long))[0].shape == (1, 16, 61)
    assert model(torch.zeros(3, 1, dtype=torch.long))[0].shape == (3, 1, 61)


def test_loss_is_the_mean_cross_entropy() -> None:
    model = build()
    x, y = batch(seed=3)
    logits, loss = model(x, y)
    total = 0.0
    for row, target in zip(logits.detach().reshape(-1, 61).double(), y.flatten(), strict=True):
        total += math.log(row.exp().sum().item()) - row[target].item()
    assert loss.item() == pytest.approx(total / y.numel(), rel=1e-5)
    assert model(x)[1] is None
    assert torch.equal(model(x)[0], logits)


def test_masked_targets_do_not_count() -> None:
    model = build()
    x, y = batch(seed=3)
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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_masked_targets_is_an_empty_sum(scheme: str, dtype: torch.dtype) -> None:
    model = build(scheme=scheme).to(dtype)
    x, y = batch(seed=3)
    _, loss = model(x, torch.full_like(y, -1))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_masked_sequence_takes_no_part_in_the_mean() -> None:
    model = build()
    x, y = batch(seed=3)
    y[2] = -1
    kept = torch.tensor([0, 1, 3])
    assert model(x, y)[1].item() == pytest.approx(model(x[kept], y[kept])[1].item(), rel=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_no_tokens_are_no_loss(scheme: str, shape: tuple[int, int]) -> None:
    model = build(scheme=scheme)
    tokens = torch.zeros(shape, dtype=torch.long)
    logits, loss = model(tokens, tokens)
    assert logits.shape == (*shape, 61) and loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_targets_may_be_a_view() -> None:
    model = build()
    tokens = torch.randint(61, (4, 17))
    loose = model(tokens[:, :-1], tokens[:, 1:])[1]
    assert torch.equal(loose, model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1])


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
    added = 3 * (3 * 32 + 32 + 4 * 32 + 32) + 7 * 32
    assert with_bias.num_parameters() - without.num_parameters() == added


def test_dropout_acts_in_training_only() -> None:
    model, plain = build(dropout=0.3), build()
    plain.load_state_dict(model.state_dict())
    x, _ = batch(seed=3)
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])
    torch.testing.assert_close(model(x)[0], plain(x)[0])


def test_dropout_reaches_embedding_attention_and_both_sublayers() -> None:
    model = build(dropout=0.5)
    x = torch.randn(2, 16, 32)
    block = model.blocks[0]
    for output in (model.embed(batch(seed=3)[0]), block.attn(x), block.mlp(x)):
        assert abs((output == 0).float().mean().item() - 0.5) < 0.1
    block.attn.resid_dropout.p = 0.0
    assert not torch.equal(block.attn(x), block.attn(x))  # what remains acts on the attention weights


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float64(scheme: str) -> None:
    model = build(scheme=scheme)
    x, y = batch(seed=3)
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
    x, y = batch(seed=3)
    expected = model(x, y)[1].item()
    logits, loss = model.to(torch.bfloat16)(x, y)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert abs(loss.item() - expected) < 0.05
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_head_and_embedding_are_one_parameter() -> None:
    model = build()
    assert [name for name, p in model.named_parameters() if p.shape == (61, 32)] == ["wte.weight"]
    x, _ = batch(seed=3)
    logits = model(x)[0]
    with torch.no_grad():
        model.wte.weight[60] = 0  # a token that is not read: only its logit can change
    unread = ~(x == 60).any(-1)
    assert unread.any()
    assert (model(x)[0][unread][..., 60] == 0).all()
    assert torch.equal(model(x)[0][unread][..., :60], logits[unread][..., :60])
