"""Peri-LN, Pre-DyT and Keel: golden values, limits, defaults and numerics of their connections."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spheret.connections import Connection, Keel, PeriLN, PreDyT, parse_scheme
from spheret.connections.pre_dyt import DyT
from spheret.models import GPT, GPTConfig


def build(scheme: str, **changes: int | str) -> GPT:
    torch.manual_seed(0)
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 61} | changes
    return GPT(GPTConfig(scheme=scheme, **shape))


def rms(x: Tensor) -> Tensor:
    return x.double().pow(2).mean(-1).sqrt()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Both(torch.nn.Module):
    """All that a connection does: (h, f) -> the next stream and what the next sublayer reads of it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def forward(self, h: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.connection(h, f)
        return stream, self.connection.branch_input(stream)


@pytest.mark.parametrize(
    "connection",
    [PeriLN(6), PeriLN(6, "rmsnorm"), PreDyT(6, beta=True), Keel(6, 8.0), Keel(6, 8.0, "rmsnorm"), Keel(6, None)],
)
def test_gradients_of_connection_and_branch_input(connection: Connection) -> None:
    connection.double()
    h, f = random(3, 6).requires_grad_(), random(3, 6, seed=1).requires_grad_()
    both = Both(connection)
    names, values = zip(*both.named_parameters(), strict=True)

    def function(h: Tensor, f: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(both, dict(zip(names, parameters, strict=True)), (h, f))

    assert torch.autograd.gradcheck(function, (h, f, *values))


# --- Peri-LN ---


def test_peri_ln_by_hand() -> None:
    h = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    f = torch.tensor([3.0, 0.0, 0.0, 4.0], dtype=torch.float64)  # root mean square 2.5, mean 1.75, variance 3.1875
    added = PeriLN(4, "rmsnorm", eps=1e-12).double()(h, f) - h
    torch.testing.assert_close(added, torch.tensor([1.2, 0, 0, 1.6], dtype=torch.float64))
    centred = PeriLN(4, eps=1e-12).double()(h, f) - h
    torch.testing.assert_close(
        centred, torch.tensor([1.25, -1.75, -1.75, 2.25], dtype=torch.float64) / math.sqrt(3.1875)
    )


@given(scale=st.floats(0.1, 1e6), norm=st.sampled_from(["layernorm", "rmsnorm"]))
@settings(max_examples=30, deadline=None)
def test_peri_ln_does_not_see_the_scale_of_the_update(scale: float, norm: str) -> None:
    connection = PeriLN(16, norm, eps=1e-10).double()
    h, f = random(4, 16), random(4, 16, seed=1)
    torch.testing.assert_close(connection(h, scale * f), connection(h, f), rtol=1e-6, atol=1e-6)


def test_peri_ln_variance_grows_by_one_for_every_sublayer() -> None:
    connection, h = PeriLN(4096).double(), random(1, 4096)
    start = rms(h).item()
    for i in range(1, 25):
        h = connection(h, 1e-1 * random(1, 4096, seed=i)).detach()
    assert rms(h).item() / start == pytest.approx(math.sqrt(1 + 24), rel=0.05)


def test_peri_ln_reports_the_update_that_it_adds() -> None:
    connection = PeriLN(64)
    h, f = 3 * random(8, 64).float(), 1e3 * random(8, 64, seed=1).float()
    stats = connection.stats(h, f, connection(h, f))
    torch.testing.assert_close(stats["skip_gain"], torch.ones(8), rtol=0, atol=1e-4)
    torch.testing.assert_close(stats["update_ratio"], (1 / rms(h)).float(), rtol=1e-4, atol=0)


def test_peri_ln_embedding_norm() -> None:
    tokens = torch.arange(16)[None]
    assert rms(build("peri-ln").embed(tokens)).detach() == pytest.approx(torch.ones(1, 16), rel=1e-2)
    assert rms(build("peri-ln:embedding-norm=false").embed(tokens)).max() < 0.5


# --- Pre-DyT ---


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
    starts = [c.dyt.alpha().item() for block in model.blocks for _, _, c in block.sublayers()]
    assert [*starts, model.stream.dyt.alpha().item()] == pytest.approx([0.1, 0.2] * 3 + [0.3])


def first_dyt_output(model: GPT) -> float:
    """Root mean square of what the first attention reads."""
    return rms(model.blocks[0].attn_connection.branch_input(model.embed(torch.arange(16)[None]))).mean().item()


@pytest.mark.parametrize("width", [32, 128, 512])
def test_first_sublayer_sees_a_signal_at_every_width(width: int) -> None:
    assert 0.3 < first_dyt_output(build("pre-dyt", n_embd=width)) < 0.8
    assert first_dyt_output(build("pre-dyt:preset=paper", n_embd=width, init="nanogpt")) < 0.02


# --- Keel ---


def alphas(scheme: str, n_layer: int = 3) -> list[float | None]:
    return [c.alpha for block in build(scheme, n_layer=n_layer).blocks for _, _, c in block.sublayers()]


def test_keel_skip_factors() -> None:
    assert alphas("keel") == [None, 1, 6, 6, 6, 6]
    assert alphas("keel", n_layer=5) == [None, 1] + [10] * 8
    assert alphas("keel:first-block=pre-ln") == [None, None, 6, 6, 6, 6]
    assert alphas("keel:alpha=2.5") == [None, 1] + [2.5] * 4


def test_keel_with_a_strong_skip_path_normalises_the_stream() -> None:
    h, f = random(4, 16), random(4, 16, seed=1)
    out = Keel(16, 1e9, "rmsnorm", eps=1e-12).double()(h, f)
    torch.testing.assert_close(out, h / rms(h)[:, None], rtol=1e-7, atol=1e-7)


def test_keel_keeps_a_token_s_signal_where_post_ln_loses_it() -> None:
    """Product over 2L sublayers of the coefficient of the skip path, updates as large as the stream: 1 - 1/(4L)."""
    layers, gain = 12, 1.0
    connection, h = Keel(1024, 2.0 * layers, "rmsnorm"), random(1, 1024).float()
    h = h / rms(h)[:, None].float()
    for i in range(2 * layers):
        f = random(1, 1024, seed=i + 1).float()
        out = connection(h, f).detach()
        gain *= connection.stats(h, f, out)["skip_gain"].item()
        h = out
    assert gain == pytest.approx(1 - 1 / (4 * layers), abs=0.02)


def test_keel_adds_in_float32_to_a_bfloat16_stream() -> None:
    """A sum in bfloat16 drops what is below 2^-9 of it; here the update is 2^-9 of the stream."""
    alpha, low = 512.0, torch.bfloat16
    h, f = (random(64, 256, seed=i).to(low) for i in (1, 2))
    exact = alpha * h.double() + f.double()
    exact = (exact / rms(exact)[:, None]).to(low)
    connection = Keel(256, alpha, "rmsnorm").to(low)
    in_low = torch.nn.functional.rms_norm(alpha * h + f, (256,), eps=1e-5)
    wrong = [(out != exact).double().mean().item() for out in (connection(h, f).detach(), in_low)]
    assert wrong[0] < 0.01 < 0.1 < wrong[1]


def test_keel_as_the_ports_have_it_starts_with_flat_weights_at_their_width() -> None:
    rule = parse_scheme("keel:preset=paper").init_rule(1024, 32)
    assert rule.gain / math.sqrt(1024) == pytest.approx(0.02)
    assert rule.embedding_std == pytest.approx(0.02)
    assert rule.residual_gain == 1
