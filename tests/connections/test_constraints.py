"""Constraints on weights and the constants of anGPT: what they promise of the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spheret.connections import build_connection, parse_scheme
from spheret.connections.angpt import ApproximateStep, gated_silu_factor, norm_factors
from spheret.connections.weights import bound, matrices, normalise
from spheret.connections.options import Scaling
from spheret.connections.learned import ScaledVector
from spheret.models import GPT, GPTConfig

ALONG_THE_STREAM = {"wte": 1, "lm_head": 1, "c_attn": 1, "attn.c_proj": 0, "c_fc": 1, "mlp.c_proj": 0}


def build(scheme: str, **changes: object) -> GPT:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 11} | changes
    return GPT(GPTConfig(scheme=scheme, **shape))  # type: ignore[arg-type]


def norms(model: GPT, axes: dict[str, int]) -> dict[str, Tensor]:
    """Norms of every matrix along the axis that its name stands for."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            axis = next(axis for key, axis in axes.items() if name.removesuffix(".weight").endswith(key))
            found[name] = weight.detach().square().sum(axis).sqrt()
    return found


def push(model: GPT) -> None:
    """A step of an optimizer as far as a constraint can tell: matrices move, some of them inwards."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        model.blocks[0].mlp.c_fc.weight.mul_(0.5)
    model.after_step()


@pytest.mark.parametrize("bias", [False, True])
def test_ngpt_keeps_unit_norms_along_the_stream(bias: bool) -> None:
    model = build("ngpt", bias=bias)
    for _ in range(2):
        for name, found in norms(model, ALONG_THE_STREAM).items():
            torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-6, atol=0, msg=name)
        push(model)
    assert (norms(model, {"mlp.c_proj": 1, "": 1})["blocks.0.mlp.c_proj.weight"] - 1).abs().max() > 0.1


def test_angpt_starts_with_unit_rows_and_then_bounds_them() -> None:
    model = build("angpt")
    rows = dict.fromkeys(ALONG_THE_STREAM, 1)
    for name, found in norms(model, rows).items():
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-6, atol=0, msg=name)
    push(model)
    found = norms(model, rows)
    assert all(row.max() <= 1 + 1e-6 for row in found.values())
    assert found["blocks.0.mlp.c_fc.weight"].max() < 0.9  # shorter rows are left as they are


def test_ngpt_with_bounded_weights() -> None:
    model = build("ngpt:weights=bounded")
    push(model)
    found = norms(model, ALONG_THE_STREAM)
    assert all(row.max() <= 1 + 1e-6 for row in found.values())
    assert found["blocks.0.mlp.c_fc.weight"].max() < 0.9


def test_every_matrix_meets_the_stream_once() -> None:
    for scheme, positions in (("ngpt", "learned"), ("ngpt:head=tied", "rope"), ("pre-ln", "learned")):
        model = build(scheme, positions=positions)
        assert {id(w) for w, _ in matrices(model)} == {id(p) for p in model.parameters() if p.dim() == 2}
        assert len(list(matrices(model))) == len({id(w) for w, _ in matrices(model)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_zeros_stay_zero(dtype: torch.dtype) -> None:
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]], dtype=dtype)
    normalised, bounded = weight.clone(), weight.clone()
    normalise(normalised, 1)
    bound(bounded, 1)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-6
    expected = torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, 0.8]], dtype=dtype)
    torch.testing.assert_close(normalised, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(bounded[1], expected[1], rtol=tolerance, atol=0)
    assert torch.equal(bounded[[0, 2]], weight[[0, 2]])


# --- stored scales ---


def test_a_stored_scale_moves_by_start_over_scale() -> None:
    vector = ScaledVector(4, Scaling(0.05, 0.25))
    assert torch.allclose(vector(), torch.full((4,), 0.05)) and torch.all(vector.weight == 0.25)
    optimizer = torch.optim.Adam(vector.parameters(), lr=0.01)
    vector().sum().backward()
    optimizer.step()  # Adam's first step is the learning rate itself
    torch.testing.assert_close(vector(), torch.full((4,), 0.05 - 0.01 * 0.05 / 0.25), rtol=1e-5, atol=0)


def test_rates_of_ngpt_are_never_negative_and_come_back() -> None:
    vector = ScaledVector(2, Scaling(0.05, 1.0), positive=True)
    with torch.no_grad():
        vector.weight.copy_(torch.tensor([-2.0, 2.0]))
    assert torch.allclose(vector(), torch.tensor([0.1, 0.1]))
    vector().sum().backward()
    assert torch.allclose(vector.weight.grad, torch.tensor([-0.05, 0.05]))


# --- constants of anGPT ---


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
        h = read = model.embed(torch.randint(61, (4, 32)))
        for block in model.blocks:
            h, read = block(h, read)
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
