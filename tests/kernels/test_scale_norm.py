"""ScaleNorm as one node: values, derivatives of both orders, and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from spheret import geometry
from spheret.kernels import scale_norm, unit


@pytest.mark.parametrize("radius_shape", [(1,), (3, 1)])
def test_derivatives_of_both_orders(radius_shape: tuple[int, ...]) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    radius = (2 + torch.rand(radius_shape, dtype=torch.float64)).requires_grad_()
    assert gradcheck(scale_norm, (x, radius)) and gradgradcheck(scale_norm, (x, radius))
    assert gradcheck(unit, (x,)) and gradgradcheck(unit, (x,))
    torch.testing.assert_close(unit(x), scale_norm(x, torch.ones(1, dtype=torch.float64)))


def test_values_of_ordinary_extreme_and_empty_rows() -> None:
    x = torch.tensor([[3.0, 4.0], [3e-30, 4e-30], [3e30, 4e30], [0.0, 0.0]], requires_grad=True)
    out = scale_norm(x, torch.tensor([10.0]))
    torch.testing.assert_close(out, torch.tensor([[6.0, 8.0]] * 3 + [[0.0, 0.0]]), rtol=1e-6, atol=0)
    out.sum().backward()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(x.grad[3], torch.full((2,), 10 / math.sqrt(2)))


def test_rows_that_are_hardly_numbers_stay_finite() -> None:
    x = torch.tensor([[5e-38, -1e-38], [1e-39, 0.0], [1e-45, 0.0], [3e38, 3e38]], requires_grad=True)
    out = scale_norm(x, torch.tensor([27.7], requires_grad=True))
    out.sum().backward()
    assert out.isfinite().all() and not x.grad.isnan().any()
    torch.testing.assert_close(out[3], torch.full((2,), 27.7 / math.sqrt(2)))


def test_a_vanished_radius_has_finite_gradients() -> None:
    x, radius = torch.randn(3, 5, requires_grad=True), torch.zeros(1, requires_grad=True)
    scale_norm(x, radius).sum().backward()
    assert x.grad.isfinite().all() and radius.grad.isfinite().all()


def test_the_result_is_kept_and_nothing_else_of_its_size() -> None:
    x, kept = torch.randn(32, 256, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = scale_norm(x, torch.ones(1, requires_grad=True))
    large = [t for t in kept if t.numel() > 32]
    assert [t.data_ptr() for t in large] == [out.data_ptr()]


def test_function_transforms() -> None:
    x = torch.randn(3, 5)
    radius = torch.tensor([2.0])
    torch.testing.assert_close(torch.func.vmap(lambda x: scale_norm(x, radius))(x), scale_norm(x, radius))
    _, tangent = torch.func.jvp(lambda x: scale_norm(x, radius), (x,), (x,))
    torch.testing.assert_close(tangent, torch.zeros_like(x), rtol=0, atol=1e-6)


# --- radius 1 ---


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7), (3, 1)])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_unit_equals_the_reference_at_every_scale(shape: tuple[int, ...], magnitude: float) -> None:
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


def test_unit_of_rows_of_zeros() -> None:
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
