"""Peri-LN: golden values, limits and the growth of its stream."""

from __future__ import annotations

import math

import pytest
import torch
from builders import build, check_gradients, random, rms
from hypothesis import given, settings
from hypothesis import strategies as st

from spheret.connections import Connection, PeriLN


@pytest.mark.parametrize("connection", [PeriLN(6), PeriLN(6, "rmsnorm")])
def test_gradients_of_connection_and_branch_input(connection: Connection) -> None:
    check_gradients(connection)


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
