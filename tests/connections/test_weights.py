"""What modules say about their weights: roles for optimizers, and constraints on matrices."""

from __future__ import annotations

import pytest
import torch
from builders import build_tiny
from torch import Tensor

from spheret.connections.weights import bound, matrices, normalise
from spheret.models import GPT

ALONG_THE_STREAM = {"wte": 1, "lm_head": 1, "c_attn": 1, "attn.c_proj": 0, "c_fc": 1, "mlp.c_proj": 0}


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
    model = build_tiny("ngpt", bias=bias)
    for _ in range(2):
        for name, found in norms(model, ALONG_THE_STREAM).items():
            torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-6, atol=0, msg=name)
        push(model)
    assert (norms(model, {"mlp.c_proj": 1, "": 1})["blocks.0.mlp.c_proj.weight"] - 1).abs().max() > 0.1


def test_angpt_starts_with_unit_rows_and_then_bounds_them() -> None:
    model = build_tiny("angpt")
    rows = dict.fromkeys(ALONG_THE_STREAM, 1)
    for name, found in norms(model, rows).items():
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-6, atol=0, msg=name)
    push(model)
    found = norms(model, rows)
    assert all(row.max() <= 1 + 1e-6 for row in found.values())
    assert found["blocks.0.mlp.c_fc.weight"].max() < 0.9  # shorter rows are left as they are


def test_ngpt_with_bounded_weights() -> None:
    model = build_tiny("ngpt:weights=bounded")
    push(model)
    found = norms(model, ALONG_THE_STREAM)
    assert all(row.max() <= 1 + 1e-6 for row in found.values())
    assert found["blocks.0.mlp.c_fc.weight"].max() < 0.9


def test_every_matrix_meets_the_stream_once() -> None:
    for scheme, positions in (("ngpt", "learned"), ("ngpt:head=tied", "rope"), ("pre-ln", "learned")):
        model = build_tiny(scheme, positions=positions)
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
