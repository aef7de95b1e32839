"""The gate of gated-spheret; its formula is checked in test_formulas.py."""

from __future__ import annotations

import torch
from builders import SMALL, batch, build

from spheret.connections import build_connection
from spheret.connections.gated_spheret import GatedSpheretNorm


def test_it_starts_as_spheret() -> None:
    idx, _ = batch()
    own, plain = (build(scheme, seed=3, **SMALL) for scheme in ("gated-spheret", "spheret"))
    assert torch.equal(own(idx)[0], plain(idx)[0])


def test_each_token_takes_a_step_of_its_own() -> None:
    torch.manual_seed(1)
    h, f = torch.randn(3, 8), torch.randn(3, 8)
    connection = build_connection("gated-spheret:p=1", dim=8, n_layer=4)
    plain = build_connection("proj", dim=8, n_layer=4)
    assert isinstance(connection, GatedSpheretNorm)
    with torch.no_grad():
        # Far to one side of the first coordinate, far to the other, and on the boundary.
        connection.gate.weight.copy_(torch.tensor([1.0, *[0.0] * 7]))
        h[:, 0] = torch.tensor([-1e3, 1e3, 0.0])
    out = connection(h, f)
    assert torch.equal(out[0], h[0]), "g = 0: the token stays where it is"
    torch.testing.assert_close(out[1], plain(h, 2 * f)[1], rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(out[2], plain(h, f)[2])
