"""FLOPs and hours against PyTorch's counter and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spheret.connections import list_schemes
from spheret.costs.cost import (
    GPUS,
    block_flops,
    count_parameters,
    find_gpu,
    forward_flops,
    run_cost,
    training_flops,
)
from spheret.models import GPT, GPTConfig
from spheret.training import TrainConfig


@pytest.mark.parametrize("scheme", list_schemes())
def test_flops_are_those_that_pytorch_counts(scheme: str) -> None:
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=48, vocab_size=101, scheme=scheme)
    model, tokens = GPT(config), torch.zeros(3, 48, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        _, loss = model(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward_flops(config) * tokens.numel() == pytest.approx(forward.get_total_flops(), rel=0.01)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert training_flops(config) * tokens.numel() == pytest.approx(total, rel=0.01)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())


def test_gpt2_small_by_hand() -> None:
    config = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
    blocks = 12 * (12 * 768**2 * 2 + 4 * 768 * 1024)
    assert block_flops(config) == blocks
    assert training_flops(config) == 3 * (blocks + 2 * 768 * 50304)


def test_hours() -> None:
    model = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=31)
    cost = run_cost(TrainConfig(model=model, steps=100, batch_size=2, warmup_ratio=0))
    assert cost.tokens == 3200 and cost.flops == 3200 * training_flops(model)
    assert cost.recompute_flops_per_token == block_flops(model)
    assert cost.hours(find_gpu("a100-80gb"), 0.5) == pytest.approx(cost.flops / (0.5 * 312e12) / 3600)
    full = run_cost(TrainConfig(model=model, steps=100, batch_size=2, warmup_ratio=0, dtype="float32"))
    assert full.hours(GPUS["H100"], 1.0) == pytest.approx(cost.hours(GPUS["H100"], 1.0) * 989 / 67)


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"mfu = 1\.5"):
        GPUS["H100"].seconds(1.0, mfu=1.5)
    with pytest.raises(ValueError, match=r"gpu = 'V100' is not known: choose one of A100-80GB"):
        find_gpu("V100")
