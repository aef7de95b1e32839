"""Rotary positions: a rotation, relative, in the planes and with the sign of the transformers library."""

from __future__ import annotations

import math

import pytest
import torch
from builders import build_tiny

from spheret.models import GPTConfig
from spheret.models.attention import rope_angles, rotate


@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_norms_are_kept(head_dim: int) -> None:
    x = torch.randn(3, 2, 50, head_dim, dtype=torch.float64)
    turned = rotate(x, rope_angles(50, head_dim))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    assert (turned[..., 1:, :] - x[..., 1:, :]).abs().max() > 0.1


def test_the_product_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    angles = rope_angles(400, 16).double()
    turn = lambda x, m: rotate(x.view(1, 16), angles[m : m + 1])[0]  # noqa: E731
    products = {(m, n): (turn(q, m) @ turn(k, n)).item() for m, n in ((7, 2), (105, 100), (395, 390), (2, 7))}
    assert products[7, 2] == pytest.approx(products[105, 100], abs=1e-5)
    assert products[7, 2] == pytest.approx(products[395, 390], abs=1e-4)
    assert abs(products[7, 2] - products[2, 7]) > 1e-2


def test_planes_and_angles() -> None:
    """Position m turns (x_0, x_2) by m and (x_1, x_3) by m/100 for d_h = 4 and base 10^4."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]).view(2, 1, 4).expand(2, 6, 4)
    turned = rotate(x, rope_angles(6, 4))
    for m in range(6):
        expected = [[math.cos(m), 0, math.sin(m), 0], [0, -math.sin(m / 100), 0, math.cos(m / 100)]]
        torch.testing.assert_close(turned[:, m], torch.tensor(expected), rtol=0, atol=1e-6)


def test_angles_stay_float32_in_a_bfloat16_model() -> None:
    model = build_tiny(n_layer=1, n_head=1, n_embd=8, block_size=512, positions="rope").to(torch.bfloat16)
    q = torch.ones(1, 1, 512, 8, dtype=torch.bfloat16)
    turned, _ = model.blocks[0].attn.prepare(q, q)
    assert turned.dtype == torch.bfloat16
    assert not torch.equal(turned[0, 0, 510], turned[0, 0, 511])


def test_a_model_without_positions_of_its_own_tells_orders_apart() -> None:
    model = build_tiny(positions="rope").eval()
    assert model.wpe is None and model.num_parameters(embeddings=False) == model.num_parameters()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]))[0][:, -1]
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def test_heads_of_odd_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n_embd = 12, n_head = 4: .* even width, not 3"):
        GPTConfig(n_layer=1, n_head=4, n_embd=12, positions="rope")
