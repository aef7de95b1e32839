"""The retraction: independent evaluation, gradients, invariants, extreme rows."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spheret
from spheret.geometry import angle, norm, retract_rows, row_scale, rows

EXPONENTS = [0.05, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 2.7, 3.0, 4.0, 17.0, 1e3, 1e6, math.inf]


def exact_retraction(h: list[float], f: list[float], step: float, p: float) -> list[mpmath.mpf]:
    """Formula of the paper in 40 digits, written without anything of the package."""
    hs, fs = [mpmath.mpf(v) for v in h], [mpmath.mpf(v) for v in f]
    r2 = sum(v * v for v in hs)
    radial = sum(a * b for a, b in zip(hs, fs, strict=True)) / r2
    w = [mpmath.mpf(step) * (b - radial * a) for a, b in zip(hs, fs, strict=True)]
    length = mpmath.sqrt(sum(v * v for v in w))
    if length == 0:
        return hs
    beta = length / mpmath.sqrt(r2)
    theta = beta if math.isinf(p) else mpmath.mpf(p) * mpmath.atan(beta / mpmath.mpf(p))
    return [
        mpmath.cos(theta) * a + mpmath.sin(theta) * mpmath.sqrt(r2) * b / length for a, b in zip(hs, w, strict=True)
    ]


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("beta", [1e-12, 1e-8, 1e-4, 0.01, 0.3, 1.0, 3.0, 40.0, 1e3, 1e6])
def test_matches_forty_digits(p: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(7, dtype=torch.float64, generator=generator)
    v = torch.randn(7, dtype=torch.float64, generator=generator)
    v = v - (v @ h) / (h @ h) * h
    f = v * (beta * h.norm() / v.norm()) + 0.37 * h
    with mpmath.workdps(40):
        exact = exact_retraction(h.tolist(), f.tolist(), 1.0, p)
        theta = beta if math.isinf(p) else p * math.atan(beta / p)
        # beta is a quotient of rounded sums: its relative error of a few 1e-16 turns an angle of 1e6 by 1e-10.
        tolerance = (1e-12 + 2e-15 * theta) * float(h.norm())
        for exponent in (p, torch.tensor([p], dtype=torch.float64)):
            ours = spheret.retract(h, f, p=exponent)
            assert max(abs(mpmath.mpf(a) - b) for a, b in zip(ours.tolist(), exact, strict=True)) <= tolerance


@pytest.mark.parametrize("p", [0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 2.7, 3.0, 4.0, 6.0, math.inf])
@pytest.mark.parametrize("with_radius", [False, True])
def test_hand_written_backward_passes_gradcheck(p: float, with_radius: bool) -> None:
    torch.manual_seed(0)
    h, f = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    alpha = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    radius = torch.tensor([2.0], dtype=torch.float64, requires_grad=True) if with_radius else None
    exponent = torch.tensor([p], dtype=torch.float64, requires_grad=True)

    def fixed(h: torch.Tensor, f: torch.Tensor, alpha: torch.Tensor, *radius: torch.Tensor) -> torch.Tensor:
        return spheret.retract(h, f, alpha=alpha, p=p, radius=radius[0] if radius else None)

    def learned(p: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return spheret.retract(rest[0], rest[1], alpha=rest[2], p=p, radius=rest[3] if len(rest) > 3 else None)

    inputs = (h, f, alpha) if radius is None else (h, f, alpha, radius)
    assert torch.autograd.gradcheck(fixed, inputs)
    if math.isfinite(p):
        assert torch.autograd.gradcheck(learned, (exponent, *inputs))


@pytest.mark.parametrize("p", [0.3, 1.0, 2.0, 2.7, math.inf])
def test_hand_written_backward_equals_autograd_of_the_reference(p: float) -> None:
    torch.manual_seed(1)
    h, f = (torch.randn(4, 33, dtype=torch.float64, requires_grad=True) for _ in range(2))
    g = torch.randn(4, 33, dtype=torch.float64)
    ours = torch.autograd.grad(spheret.retract(h, f, alpha=0.8, p=p), (h, f), g)
    reference = torch.autograd.grad(retract_rows(h, f, 0.8, p), (h, f), g)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-13)


def test_custom_angle_function() -> None:
    torch.manual_seed(0)
    h, f = (torch.randn(6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    a = torch.tensor([0.9], dtype=torch.float64, requires_grad=True)
    ours = spheret.retract(h, f, alpha=a, p=2.0)
    custom = spheret.retract(h, f, alpha=a, angle=lambda beta: angle(beta, 2.0))
    torch.testing.assert_close(custom, ours)
    assert torch.autograd.gradcheck(lambda h, f, a: spheret.retract(h, f, alpha=a, angle=torch.tanh), (h, f, a))
    zero = torch.zeros_like(f, requires_grad=True)
    (grad,) = torch.autograd.grad(spheret.retract(h, zero, angle=torch.tanh).sum(), zero)
    assert grad.isfinite().all()


def test_known_members_of_the_family() -> None:
    torch.manual_seed(0)
    h, f = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    r2 = h @ h
    w = 0.7 * (f - (h @ f) / r2 * h)
    skew = (torch.outer(w, h) - torch.outer(h, w)) / r2
    eye = torch.eye(5, dtype=torch.float64)
    projection = h.norm() * (h + w) / (h + w).norm()
    cayley = torch.linalg.solve(eye - skew / 2, (eye + skew / 2) @ h)
    exponential = torch.linalg.matrix_exp(skew) @ h
    for p, expected in ((1.0, projection), (2.0, cayley), (math.inf, exponential)):
        torch.testing.assert_close(spheret.retract(h, f, alpha=0.7, p=p), expected)


def test_exponential_map_equals_geoopt() -> None:
    """geoopt's unit sphere is an independent implementation of p = inf and p = 1."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import geoopt
    sphere = geoopt.Sphere()
    torch.manual_seed(0)
    h = torch.nn.functional.normalize(torch.randn(9, 16, dtype=torch.float64), dim=-1)
    f = torch.randn(9, 16, dtype=torch.float64)
    tangent = sphere.proju(h, f)
    torch.testing.assert_close(spheret.retract(h, f, p=math.inf), sphere.expmap(h, tangent))
    torch.testing.assert_close(spheret.retract(h, f, p=1.0), sphere.retr(h, tangent))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    p=st.one_of(st.floats(0.05, 50), st.just(math.inf)),
    alpha=st.floats(-3, 3),
    scale=st.floats(1e-3, 1e3),
    dim=st.integers(2, 40),
)
def test_invariants(seed: int, p: float, alpha: float, scale: float, dim: int) -> None:
    """Norm kept; homogeneous; equivariant under rotations; blind to the radial part; J_h^T h' = h."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(3, dim, dtype=torch.float64, generator=generator)
    f = torch.randn(3, dim, dtype=torch.float64, generator=generator)
    rotation = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q
    h.requires_grad_()
    out = spheret.retract(h, f, alpha=alpha, p=p)
    torch.testing.assert_close(out.norm(dim=-1), h.norm(dim=-1), rtol=1e-12, atol=0)
    same = dict(rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(spheret.retract(h @ rotation, f @ rotation, alpha=alpha, p=p), out @ rotation, **same)
    scaled = spheret.retract(scale * h, scale * f, alpha=alpha, p=p)
    torch.testing.assert_close(scaled, scale * out, rtol=1e-8, atol=1e-9 * scale)
    torch.testing.assert_close(spheret.retract(h, f + 1.7 * h, alpha=alpha, p=p), out, **same)
    (pulled_back,) = torch.autograd.grad(out, h, out.detach())
    torch.testing.assert_close(pulled_back, h.detach(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size_h", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size_f", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, None])
def test_extreme_rows(dtype: torch.dtype, size_h: float, size_f: float, parallel: bool, p: float | None) -> None:
    torch.manual_seed(0)
    base_h = torch.randn(4, 8)
    base_f = base_h if parallel else torch.randn(4, 8)
    h = (size_h * base_h).to(dtype).requires_grad_()
    f = (size_f * base_f).to(dtype).requires_grad_()
    alpha = torch.ones(1, requires_grad=True)
    exponent = torch.ones(1, requires_grad=True) if p is None else p
    out = spheret.retract(h, f, alpha=alpha, p=exponent)
    out.float().sum().backward()
    for tensor in (out, h.grad, f.grad, alpha.grad):
        assert tensor is not None and tensor.isfinite().all()
    if p is None:
        assert exponent.grad.isfinite().all()
    if size_h:
        unit = 8e-3 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(norm(out) / size_h, norm(h) / size_h, rtol=unit, atol=0, check_dtype=False)
    if size_f == 0:
        assert torch.equal(out, h)
    if p == 1.0 and not parallel and dtype != torch.bfloat16 and size_f > 1e3 * size_h > 0:
        # A huge step turns by a right angle, towards the tangent part of f.
        hb, fb = base_h.double(), base_f.double()
        w = fb - (fb * hb).sum(-1, keepdim=True) / (hb * hb).sum(-1, keepdim=True) * hb
        expected = hb.norm(dim=-1, keepdim=True) * w / w.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(out.double() / size_h, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [16, 64, 128, 768])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_nearly_parallel_rows_keep_their_digits(dim: int, factor: float) -> None:
    """|f|^2 - <h,f>^2/|h|^2 has no digit left here; the explicit tangent part has them all, if f and h are scaled and
    subtracted without rounding."""
    torch.manual_seed(0)
    h = torch.randn(200, dim)
    f = factor * (h + 1e-4 * torch.randn(200, dim))
    beta, exact = rows(h, f, 500.0).beta, rows(h.double(), f.double(), 500.0).beta
    assert (beta / exact - 1).abs().max() < 1e-6
    with spheret.backend("autograd"):
        out = spheret.retract(h, f, alpha=500.0)
    torch.testing.assert_close(out, spheret.retract(h.double(), f.double(), alpha=500.0).float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_scaled_by_powers_of_two(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    h = torch.tensor([[0, 0], [info.tiny, 0], [-0.75, 0.5], [1, -1], [3, 7.99], [info.max, 1]], dtype=dtype)
    scale = row_scale(h).squeeze(-1)
    expected = torch.tensor(
        [info.tiny, info.tiny, 0.5, 1, 4, 2.0 ** math.floor(math.log2(info.max) - 0.5)], dtype=dtype
    )
    assert torch.equal(scale, expected)


def test_zero_step_is_the_identity_and_still_learns() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(5, 9), torch.randn(5, 9)
    alpha = torch.zeros(1, requires_grad=True)
    out = spheret.retract(h, f, alpha=alpha)
    assert torch.equal(out, h)
    (grad,) = torch.autograd.grad((out * torch.randn(5, 9)).sum(), alpha)
    assert grad.isfinite().all() and grad.abs() > 1e-3


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (2, 3, 4, 8), (0, 8), (4, 1)])
@pytest.mark.parametrize(
    ("dtype_h", "dtype_f"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
)
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype_h: torch.dtype, dtype_f: torch.dtype) -> None:
    torch.manual_seed(0)
    h, f = torch.randn(shape).to(dtype_h).requires_grad_(), torch.randn(shape).to(dtype_f).requires_grad_()
    out = spheret.retract(h, f, alpha=0.5)
    out.sum().backward()
    assert out.shape == h.shape and out.dtype == dtype_h
    assert h.grad.dtype == dtype_h and f.grad.dtype == dtype_f
    if shape[-1] == 1:
        assert torch.equal(out, h)  # one dimension has no tangent


def test_strided_inputs_and_gradients() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(8, 6).t().requires_grad_(), torch.randn(1, 8).expand(6, 8)
    out = spheret.retract(h, f)
    out.backward(torch.ones(1).expand(6, 8))
    torch.testing.assert_close(out, spheret.retract(h.contiguous(), f.contiguous()))
    assert h.grad.isfinite().all()


def test_per_row_step_and_radius() -> None:
    torch.manual_seed(0)
    h, f = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    alpha = torch.rand(2, 3, 1)
    out = spheret.retract(h, f, alpha=alpha, radius=3.0)
    torch.testing.assert_close(out.norm(dim=-1), torch.full((2, 3), 3.0))
    torch.testing.assert_close(out[1, 2], spheret.retract(h[1, 2], f[1, 2], alpha=float(alpha[1, 2]), radius=3.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(f=torch.ones(2, 4)), r"\(2, 3\).*\(2, 4\)"),
        (dict(p=0.0), r"p = 0\.0"),
        (dict(p=-1.0), r"p = -1"),
        (dict(p=math.nan), "p = nan"),
        (dict(radius=0.0), "radius = 0"),
        (dict(alpha=torch.ones(3)), r"alpha has shape \(3,\)"),
        (dict(h=torch.ones(2, 0), f=torch.ones(2, 0)), "at least 1"),
    ],
)
def test_errors_name_the_value(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spheret.retract(**{"h": torch.ones(2, 3), "f": torch.ones(2, 3), **arguments})


def test_integer_input_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        spheret.retract(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 2.7, math.inf])
def test_second_derivatives(p: float) -> None:
    torch.manual_seed(0)
    h, f = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    alpha = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda h, f, a: spheret.retract(h, f, alpha=a, p=p), (h, f, alpha))
    assert torch.autograd.gradgradcheck(lambda h, f, a: spheret.retract(h, f, alpha=a, p=p, radius=2.0), (h, f, alpha))


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 2.7, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_radius", [False, True])
def test_a_row_of_zeros_stays_and_has_finite_gradients(p: float, dtype: torch.dtype, with_radius: bool) -> None:
    h = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    f = torch.randn(2, 8, dtype=dtype, requires_grad=True)
    alpha = torch.ones(1, dtype=dtype, requires_grad=True)
    out = spheret.retract(h, f, alpha=alpha, p=p, radius=3.0 if with_radius else None)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    for grad in (h.grad, f.grad, alpha.grad):
        assert grad.isfinite().all()
    assert torch.equal(f.grad, torch.zeros_like(f)) and alpha.grad == 0


def test_norm_of_zero_has_gradient_zero() -> None:
    h = torch.zeros(2, 4, requires_grad=True)
    norm(h).sum().backward()
    assert torch.equal(h.grad, torch.zeros(2, 4))
