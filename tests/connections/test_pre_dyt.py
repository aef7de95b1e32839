"""Pre-DyT: golden values, limits, where alpha starts, and number formats."""

from __future__ import annotations

import pytest
import torch
from builders import build, check_gradients, connections, random, rms
from hypothesis import given, settings
from hypothesis import strategies as st

from spheret.connections import Connection, PreDyT, parse_scheme
from spheret.connections.pre_dyt import DyT
from spheret.models import GPT


@pytest.mark.parametrize("connection", [PreDyT(6), PreDyT(6, beta=True)])
def test_gradients_of_connection_and_branch_input(connection: Connection) -> None:
    check_gradients(connection)


def test_dyt_by_hand() -> None:
    x = torch.tensor([-2.0, 0.0, 1.0, 40.0], dtype=torch.float64)
    expected = torch.tensor([-0.7615941559557649, 0.0, 0.46211715726000973, 1.0], dtype=torch.float64)
    torch.testing.assert_close(DyT(4, 0.5).double()(x), expected)


@given(alpha=st.floats(0.01, 2.0), size=st.floats(1e-6, 0.2))
@settings(max_examples=30, deadline=None)
def test_dyt_of_small_entries_is_linear(alpha: float, size: float) -> None:
    dyt, x = DyT(8, alpha).double(), size * random(4, 8).clamp(-1, 1)
    with torch.no_grad():
        dyt.gamma.copy_(random(8, seed=1))
    alpha = dyt.alpha.weight.item()  # as float32 holds it
    off = (dyt(x) - dyt.gamma * alpha * x).abs()
    assert (off <= dyt.gamma.abs() * (alpha * x).abs() ** 3 / 3 + 1e-15).all()


def test_dyt_saturates_at_plus_and_minus_gamma_around_beta() -> None:
    dyt = DyT(2, 0.5, beta=True)
    with torch.no_grad():
        dyt.gamma.copy_(torch.tensor([2.0, 3.0]))
        dyt.beta.copy_(torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(dyt(torch.tensor([1e30, -1e30])), torch.tensor([12.0, 17.0]))


def test_dyt_keeps_a_small_step_of_alpha_in_a_bfloat16_model() -> None:
    dyt = DyT(4, 1.0).to(torch.bfloat16)
    with torch.no_grad():
        dyt.alpha.weight.add_(1e-3)
    assert dyt.alpha.weight.item() == pytest.approx(1.001)
    out = dyt(torch.ones(4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and dyt.gamma.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("width", "attention", "other"),
    [(64, 0.5, 0.5), (2048, 0.5, 0.5), (4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05), (16384, 0.2, 0.05)],
)
def test_alpha_starts_as_the_width_wants_it(width: int, attention: float, other: float) -> None:
    scheme = parse_scheme("pre-dyt")
    starts = [scheme.connection(width, layer_idx=0, n_layer=2, sublayer=i).dyt.alpha().item() for i in (0, 1)]
    assert [*starts, scheme.stream(width, 2).dyt.alpha().item()] == pytest.approx([attention, other, other])


def test_given_alphas_go_where_they_belong() -> None:
    model = build("pre-dyt:attention-alpha=0.1,mlp-alpha=0.2,final-alpha=0.3")
    starts = [c.dyt.alpha().item() for c in connections(model)]
    assert [*starts, model.stream.dyt.alpha().item()] == pytest.approx([0.1, 0.2] * 3 + [0.3])


def first_dyt_output(model: GPT) -> float:
    """Root mean square of what the first attention reads."""
    return rms(model.blocks[0].attn_connection.branch_input(model.embed(torch.arange(16)[None]))).mean().item()


@pytest.mark.parametrize("width", [32, 128, 512])
def test_first_sublayer_sees_a_signal_at_every_width(width: int) -> None:
    assert 0.3 < first_dyt_output(build("pre-dyt", n_embd=width)) < 0.8
    assert first_dyt_output(build("pre-dyt:preset=paper", n_embd=width, init="nanogpt")) < 0.02
