"""Keel: its skip factors, limits and numerics."""

from __future__ import annotations

import math

import pytest
import torch
from builders import build, check_gradients, connections, random, rms

from spheret.connections import Connection, Keel, parse_scheme


@pytest.mark.parametrize("connection", [Keel(6, 8.0), Keel(6, 8.0, "rmsnorm"), Keel(6, None)])
def test_gradients_of_connection_and_branch_input(connection: Connection) -> None:
    check_gradients(connection)


def alphas(scheme: str, n_layer: int = 3) -> list[float | None]:
    return [c.alpha for c in connections(build(scheme, n_layer=n_layer))]


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
