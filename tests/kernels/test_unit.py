"""Normalisation with its own derivative, against the plain formula and the reference in geometry."""

from __future__ import annotations

import pytest
import torch

from spheret import geometry
from spheret.kernels import unit


def test_gradcheck() -> None:
    torch.manual_seed(0)
    h = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit, h)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7), (3, 1)])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_equals_the_reference_at_every_scale(shape: tuple[int, ...], magnitude: float) -> None:
    torch.manual_seed(0)
    h = (magnitude * torch.randn(shape)).requires_grad_()
    same = h.detach().clone().requires_grad_()
    direction = magnitude * torch.randn(shape)
    out, expected = unit(h), same / geometry.norm(same)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    if h.numel():
        torch.testing.assert_close(out.norm(dim=-1), torch.ones(shape[:-1]))
    (out * direction).sum().backward()
    exact = h.detach().double().requires_grad_()
    (exact / exact.norm(dim=-1, keepdim=True) * direction).sum().backward()
    torch.testing.assert_close(h.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)


def test_rows_of_zeros() -> None:
    h = torch.randn(3, 5)
    h[1] = 0
    h.requires_grad_()
    out = unit(h)
    assert not out[1].any()
    out.sum().backward()
    assert h.grad.isfinite().all() and h.grad.abs().max() < 1e2


def test_bfloat16_is_normalised_in_float32() -> None:
    h = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    out = unit(h)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(64))
    out[:, 0].sum().backward()
    assert h.grad is not None and h.grad.dtype == torch.bfloat16
