"""The angle map against 40-digit arithmetic and its own closed forms."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from spheret.geometry.angles import angle, angle_exponent_slope, angle_slope, cos_and_sinc

BETAS = [1e-12, 1e-8, 1e-4, 1e-3, 0.03, 0.1, 0.5, 1.0, 2.0, 4.0, 37.5, 1e3, 1e6]
EXPONENTS = [0.05, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 2.7, 3.0, 4.0, 17.0, 1e3, 1e6, math.inf]


def exact_angle(beta: float, p: float) -> mpmath.mpf:
    b = mpmath.mpf(beta)
    return b if math.isinf(p) else mpmath.mpf(p) * mpmath.atan(b / mpmath.mpf(p))


def as_tensor(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


@pytest.mark.parametrize("p", EXPONENTS)
def test_angle_and_coefficients_match_mpmath(p: float) -> None:
    with mpmath.workdps(40):
        for beta in BETAS:
            theta = exact_angle(beta, p)
            # An angle of a thousand radians cannot be held to better than its own rounding, nor can its cosine.
            tolerance = 1e-12 + 4 * 2.3e-16 * abs(float(theta))
            for exponent in (p, as_tensor(p)):  # a float may take a closed form, a tensor never does
                c, s = cos_and_sinc(as_tensor(beta), exponent)
                assert abs(float(angle(as_tensor(beta), exponent)) - theta) <= 1e-15 * theta
                assert abs(float(c) - mpmath.cos(theta)) <= tolerance
                assert abs(float(s) * beta - mpmath.sin(theta)) <= tolerance


@pytest.mark.parametrize("p", EXPONENTS)
def test_pair_lies_on_the_circle(p: float) -> None:
    beta = torch.tensor(BETAS, dtype=torch.float64)
    c, s = cos_and_sinc(beta, p)
    torch.testing.assert_close(c**2 + (beta * s) ** 2, torch.ones_like(beta), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 1.0, 2.0, 10.0, 1e3, 1e6])
def test_exponent_slope_is_right_at_every_scale(p: float, dtype: torch.dtype) -> None:
    """d theta / d p cancels to third order: the direct form has no correct digit at beta/p = 1e-4 in float32."""
    with mpmath.workdps(60):
        for beta in [1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.3, 1.0, 10.0, 1e4]:
            tau = float(angle_exponent_slope(as_tensor(beta, dtype), p))
            u = mpmath.mpf(float(as_tensor(beta, dtype))) / mpmath.mpf(p)
            exact = mpmath.atan(u) - u / (1 + u * u)
            if exact > 1e-36:  # smaller values leave float32
                assert abs(tau - exact) <= 1e-4 * exact


def test_slope_is_the_derivative() -> None:
    beta = torch.linspace(0.01, 7, 50, dtype=torch.float64, requires_grad=True)
    for p in (0.3, 1.0, 2.0, 5.0, math.inf):
        (grad,) = torch.autograd.grad(angle(beta, p).sum(), beta)
        torch.testing.assert_close(angle_slope(beta, p), grad)


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
def test_closed_forms_equal_trigonometry(p: float) -> None:
    beta = torch.logspace(-8, 6, 200, dtype=torch.float64)
    closed = cos_and_sinc(beta, p)
    trigonometric = cos_and_sinc(beta, torch.tensor(p, dtype=torch.float64))
    torch.testing.assert_close(closed, trigonometric, rtol=0, atol=5e-15)


@pytest.mark.parametrize(
    ("p", "beta"), [(2.0, 2.0), (3.0, 3 * math.tan(math.pi / 6)), (4.0, 4 * math.tan(math.pi / 8))]
)
def test_right_angle_is_reached_where_theory_says(p: float, beta: float) -> None:
    torch.testing.assert_close(angle(as_tensor(beta), p), as_tensor(math.pi / 2))


def test_limits_of_the_family() -> None:
    beta = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(angle(beta, 1e9), angle(beta, math.inf))
    assert float(angle(beta, 1e-6).max()) < 2e-6  # p -> 0: the identity map
