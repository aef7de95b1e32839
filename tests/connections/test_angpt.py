"""anGPT: its constants, and what they promise of the size of states."""

from __future__ import annotations

import math

import pytest
import torch
from builders import build
from torch import Tensor

from spheret.connections import build_connection, parse_scheme
from spheret.connections.angpt import ApproximateStep, gated_silu_factor, norm_factors
from spheret.connections.options import Scaling


def unit_rows(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


@pytest.mark.parametrize(("dim", "head_dim"), [(256, 64), (512, 32)])
def test_factors_of_angpt_bring_random_vectors_to_norm_one(dim: int, head_dim: int) -> None:
    """Monte Carlo to 1%, each map fed with unit vectors as the derivation assumes."""
    torch.manual_seed(0)
    factors, count = norm_factors(dim, head_dim), 1000

    def mean_norm(y: Tensor) -> float:
        return y.square().sum(-1).mean().sqrt().item()

    draws = 64  # of a head: it has few rows, whose own scatter would show
    heads = factors.qkv * unit_rows(count, dim) @ unit_rows(draws * head_dim, dim).T
    assert mean_norm(heads.view(count, draws, head_dim)) == pytest.approx(1, rel=0.01)
    concatenated = unit_rows(count, dim // head_dim, head_dim).flatten(1)  # norm 1 in every head
    assert mean_norm(factors.attn_out * concatenated @ unit_rows(dim, dim).T) == pytest.approx(1, rel=0.01)
    u, z = (unit_rows(count, dim) @ unit_rows(4 * dim, dim).T for _ in range(2))
    hidden = factors.up * u * torch.nn.functional.silu(factors.gate * z)
    assert mean_norm(hidden) == pytest.approx(1, rel=0.01)
    assert mean_norm(factors.down * unit_rows(count, 4 * dim) @ unit_rows(dim, 4 * dim).T) == pytest.approx(1, rel=0.01)
    assert (factors.qkv, factors.attn_out) == (math.sqrt(dim / head_dim), math.sqrt(head_dim / dim))
    assert (factors.down, factors.gate) == (2.0, math.sqrt(dim) / 2)


def test_silu_factor_equals_a_plain_sum() -> None:
    """The trapezoidal rule on +-12 standard deviations converges as fast for a Gaussian weight."""
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    for variance in (0.25, 1.0, 4.0):
        silu = torch.nn.functional.silu(math.sqrt(variance) * x)
        mean = torch.trapezoid(silu.square() * density, x).item()
        assert gated_silu_factor(variance) == pytest.approx(mean**-0.5, rel=1e-9)
    assert gated_silu_factor(0.25) == pytest.approx(3.72, abs=0.005)
    assert gated_silu_factor(1.0) == pytest.approx(1.675, abs=0.003)


@pytest.mark.parametrize(("alpha", "nu"), [(0.01, 1.01005), (0.05, 1.05118), (0.1, 1.10432), (0.5, 1.41421)])
def test_residual_factor(alpha: float, nu: float) -> None:
    for kind in ("mean", "entry"):
        step = ApproximateStep(8, Scaling(alpha, 1.0), kind)
        assert step.norm_factor(step.alpha()).mean().item() == pytest.approx(nu, rel=2e-5)
    torch.manual_seed(0)
    h, f = unit_rows(2000, 512), unit_rows(2000, 512)
    out = ApproximateStep(512, Scaling(alpha, 1.0))(h, f)
    assert out.norm(dim=-1).mean().item() == pytest.approx(1, rel=0.01)


def test_angpt_states_stay_near_norm_one_through_a_deep_model() -> None:
    model = build("angpt", n_layer=24, n_embd=128, n_head=4, vocab_size=61, block_size=32)
    with torch.no_grad():
        h = branch = model.embed(torch.randint(61, (4, 32)))
        for block in model.blocks:
            h, branch = block(h, branch)
    assert (h.norm(dim=-1) - 1).abs().max() < 0.25


def test_scalar_alpha_is_one_number() -> None:
    connection = build_connection("angpt:alpha-shape=scalar", dim=8, n_layer=2)
    assert [p.shape for p in connection.parameters()] == [(1,)]
    h, f = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(connection(h, f), build_connection("angpt", dim=8, n_layer=2)(h, f))


def test_methods_without_decay_and_warmup_say_so() -> None:
    for name in ("ngpt", "angpt"):
        training = parse_scheme(name).training(n_layer=6)
        assert (training.weight_decay, training.warmup) == (0.0, 0.0)
    assert parse_scheme("gpt-qknorm").training(6).weight_decay is None
