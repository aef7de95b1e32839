"""The one node of the retraction: its two outputs, what it keeps, second derivatives, and angle functions of the
caller's, against the float64 reference differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spheret
from spheret.geometry import Angle, retract_rows
from spheret.kernels import rotate

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("compiled_kernel"),
]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def rows(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.fixture(params=["cpp", "autograd"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with spheret.backend(request.param):
        yield request.param


# --- two outputs ---


@pytest.mark.parametrize("p", [0.5, 1.0, math.inf])
@pytest.mark.parametrize("radius", [None, 5.0])
def test_two_outputs_are_one_output_read_twice(backend: str, p: float, radius: float | None) -> None:
    h, f, g, g2 = (rows(6, 40, seed=i) for i in range(4))
    alpha = torch.tensor([0.8], requires_grad=True)
    pair = rotate(h, f, alpha, p, radius, branch_dtype=F32)
    once = spheret.retract(h, f, alpha=alpha, p=p, radius=radius)
    assert torch.equal(pair[0], once) and torch.equal(pair[1], once)
    ours = torch.autograd.grad(pair, (h, f, alpha), (g, g2))
    torch.testing.assert_close(ours, torch.autograd.grad(once, (h, f, alpha), g + g2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reader", [0, 1])
def test_one_of_two_readers_may_be_absent(backend: str, reader: int) -> None:
    h, f, g = (rows(6, 40, seed=i) for i in range(3))
    ours = torch.autograd.grad(rotate(h, f, 1.0, 1.0, branch_dtype=F32)[reader], (h, f), g)
    torch.testing.assert_close(ours, torch.autograd.grad(spheret.retract(h, f), (h, f), g), rtol=0, atol=0)


def test_the_branch_has_the_dtype_of_the_sublayer(backend: str) -> None:
    h, f = rows(6, 40), rows(6, 40, dtype=BF16, seed=1)
    stream, branch = rotate(h, f, 1.0, 1.0, branch_dtype=BF16)
    assert stream.dtype == F32 and torch.equal(branch, stream.to(BF16))
    grads = torch.autograd.grad((stream, branch), (h, f), (rows(6, 40, seed=2), rows(6, 40, dtype=BF16, seed=3)))
    assert [g.dtype for g in grads] == [F32, BF16]


def test_without_a_branch_dtype_both_results_are_one_tensor(backend: str) -> None:
    stream, branch = rotate(rows(6, 40), rows(6, 40, seed=1), 1.0, 1.0)
    assert stream is branch


# --- scalars ---


def test_lambda_is_a_factor_on_the_step(backend: str) -> None:
    h, f, g = (rows(5, 12, seed=i) for i in range(3))
    for alpha in (torch.tensor([0.8], requires_grad=True), torch.full((5, 1), 0.8, requires_grad=True)):
        if alpha.numel() > 1 and backend == "cpp":
            continue  # a step for every row takes the formulas
        one, _ = rotate(h, f, alpha, 1.5, lambda_l=0.5)
        two = spheret.retract(h, f, alpha=alpha * 0.5, p=1.5)
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(torch.autograd.grad(one, (f, alpha), g), torch.autograd.grad(two, (f, alpha), g))


@pytest.mark.parametrize("log_p", [False, True])
def test_a_learned_exponent_is_the_fixed_one_of_its_value(backend: str, log_p: bool) -> None:
    h, f, g, alpha = rows(6, 20), rows(6, 20, seed=1), rows(6, 20, seed=2), torch.tensor([0.7], requires_grad=True)
    p = torch.tensor([math.log(1.5) if log_p else 1.5], requires_grad=True)
    fixed, _ = rotate(h, f, alpha, 1.5, 2.0)
    learned, _ = rotate(h, f, alpha, p, 2.0, log_p=log_p)
    torch.testing.assert_close(fixed, learned, rtol=1e-5, atol=1e-6)
    (*of_learned, of_p) = torch.autograd.grad(learned, (h, f, alpha, p), g)
    torch.testing.assert_close(torch.autograd.grad(fixed, (h, f, alpha), g), tuple(of_learned), rtol=1e-5, atol=1e-6)
    assert of_p != 0


def test_gradient_of_a_logarithm_is_that_of_the_exponent_times_it(backend: str) -> None:
    h, f = rows(40, 20).detach(), rows(40, 20, seed=1).detach()
    alpha, rho = torch.tensor([0.9]), torch.tensor([0.6], requires_grad=True)
    p = rho.detach().exp().requires_grad_()

    def loss(exponent: Tensor, *, log_p: bool) -> Tensor:
        return rotate(h, f, alpha, exponent, log_p=log_p)[0][:, 0].square().sum()

    (by_log,), (by_value,) = (
        torch.autograd.grad(loss(rho, log_p=True), rho),
        torch.autograd.grad(loss(p, log_p=False), p),
    )
    torch.testing.assert_close(by_log, by_value * p)
    (first,) = torch.autograd.grad(loss(rho, log_p=True), rho, create_graph=True)
    torch.testing.assert_close(first, by_log)
    assert torch.autograd.grad(first, rho)[0].isfinite().all()


def test_a_logarithm_out_of_range_is_held_at_its_bound_and_keeps_a_gradient(backend: str) -> None:
    h, f = rows(40, 20), rows(40, 20, seed=1)
    rho = torch.tensor([-4.0], requires_grad=True)
    out, _ = rotate(h, f, 0.9, rho, log_p=True)
    torch.testing.assert_close(out, spheret.retract(h, f, alpha=0.9, p=math.exp(-3.0)))
    assert torch.autograd.grad(out[:, 0].sum(), rho)[0] != 0


@pytest.mark.parametrize("log_p", [False, True])
def test_an_exponent_that_is_no_number_is_seen_in_the_result(backend: str, log_p: bool) -> None:
    out, _ = rotate(rows(4, 8), rows(4, 8, seed=1), torch.ones(1), torch.tensor([math.nan]), log_p=log_p)
    assert out.isnan().all()


# --- dtypes ---


@pytest.mark.parametrize("h_dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("f_dtype", [F32, BF16, F16, F64])
def test_every_mixture_of_dtypes_rounds_once(h_dtype: torch.dtype, f_dtype: torch.dtype) -> None:
    h, f, g = rows(5, 64, dtype=h_dtype), rows(5, 64, dtype=f_dtype, seed=1), rows(5, 64, dtype=h_dtype, seed=2)
    out = spheret.retract(h, f, alpha=0.7, p=1.5)
    ours = (out, *torch.autograd.grad(out, (h, f), g))
    h64, f64 = h.detach().double().requires_grad_(), f.detach().double().requires_grad_()
    exact_out = spheret.retract(h64, f64, alpha=0.7, p=1.5)
    exact = (exact_out, *torch.autograd.grad(exact_out, (h64, f64), g.double()))
    for a, b, dtype in zip(ours, exact, (h_dtype, h_dtype, f_dtype), strict=True):
        assert a.dtype == dtype
        rounded = (b.to(dtype).double() - b).abs().max()  # what an exact result loses when it is stored
        assert (a.double() - b).abs().max() <= 2 * rounded + 2e-6


def test_autocast_changes_nothing(backend: str) -> None:
    h, f = rows(5, 64), rows(5, 64, dtype=BF16, seed=1)

    def results() -> list[Tensor]:
        out = spheret.retract(h, f)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), [h, f])]

    with torch.autocast("cpu", BF16):
        inside = results()
    assert all(torch.equal(a, b) for a, b in zip(inside, results(), strict=True))
    assert inside[0].dtype == F32


# --- what is kept, and differentiated again ---


def test_saved_for_backward() -> None:
    """h and f, which the neighbours keep anyway, and one float32 number per row."""
    h, f = rows(32, 256), rows(32, 256, seed=1)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.append(t.numel() * t.element_size()), t)[1], lambda t: t
    ):
        spheret.retract(h, f, alpha=torch.ones(1, requires_grad=True))
    assert sum(sizes) <= 2 * 32 * 256 * 4 + 32 * 4 + 16


@pytest.mark.parametrize("branch", [False, True])
def test_second_derivative_in_float32(backend: str, branch: bool) -> None:
    def loss(h: Tensor, f: Tensor) -> Tensor:
        out, other = rotate(h, f, 0.7, 1.0, branch_dtype=h.dtype if branch else None)
        return other.square()[:, 1].sum() + out.square().sum() + spheret.retract(h, f)[0, 0]

    h, f = rows(3, 5), rows(3, 5, seed=1)
    (grad,) = torch.autograd.grad(loss(h, f), h, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), f)
    h64, f64 = (t.detach().double().requires_grad_() for t in (h, f))
    with spheret.backend("auto"):
        (grad64,) = torch.autograd.grad(loss(h64, f64), h64, create_graph=True)
    (exact,) = torch.autograd.grad(grad64.square().sum(), f64)
    torch.testing.assert_close(second.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_may_be_recomputed_under_a_mode_that_was_not_there() -> None:
    connection = spheret.build_connection("spheret:p=learn-per-layer", dim=8, layer_idx=1, n_layer=4)
    h, f = rows(3, 8), rows(3, 8, seed=1).detach()
    with FlopCounterMode(display=False):
        out = checkpoint(connection, h, f, use_reentrant=False)
    (grad,) = torch.autograd.grad(out[:, 0].sum(), h)
    (expected,) = torch.autograd.grad(connection(h, f)[:, 0].sum(), h)
    torch.testing.assert_close(grad, expected)


def test_constants_of_a_call_in_inference_mode_serve_a_training_step() -> None:
    """A number is made into a tensor once; whoever comes first, others differentiate with it."""
    h, f = rows(3, 8), rows(3, 8, seed=1)
    with torch.inference_mode():
        spheret.retract(h, f, alpha=0.713, p=1.319, radius=2.73)
    out = spheret.retract(h, f, alpha=0.713, p=1.319, radius=2.73)
    assert torch.autograd.grad(out[:, 0].sum(), h)[0].isfinite().all()


# --- angle functions of the caller's ---


@pytest.fixture(params=["cpp", "triton"])
def kernel(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """A kernel on both sides of the angle function."""
    if request.param == "triton":
        request.getfixturevalue("launch")
    elif device != "cpu":
        pytest.skip("the C++ kernel runs on the CPU")
    with spheret.backend(request.param):
        yield request.param


def capped(limit: Tensor) -> Angle:
    """theta grows no further than a learned limit."""
    return lambda beta: limit.to(beta.dtype) * torch.tanh(beta / limit.to(beta.dtype))


def inputs(device: str, dtype: torch.dtype = F32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, f, g = (torch.randn(2, 3, 20, generator=generator, dtype=F64).to(device, dtype) for _ in range(3))
    f[0] *= 1e-4
    f[1, 1:] *= 100
    scalars = {"step": [0.7], "limit": [1.3], "radius": [4.0]}
    return {"h": h, "f": f, "g": g} | {k: torch.tensor(v, device=device) for k, v in scalars.items()}


def by_kernel(h: Tensor, f: Tensor, step: Tensor, angle: Angle, radius: Tensor | None = None) -> Tensor:
    assert spheret.which_backend(h, f, alpha=step, angle=angle, radius=radius).name in ("cpp", "triton")
    return spheret.retract(h, f, alpha=step, angle=angle, radius=radius)


def exact(h: Tensor, f: Tensor, step: Tensor, angle: Angle, radius: Tensor | None = None) -> Tensor:
    return retract_rows(h, f, step, 1.0, radius, angle)


def gradients(retract: Callable[..., Tensor], t: dict[str, Tensor], *, radius: bool) -> list[Tensor]:
    """Result and gradients of h, f, the step, the angle's limit, and the radius."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in t.items() if k != "g" and (radius or k != "radius")}
    out = retract(leaves["h"], leaves["f"], leaves["step"], capped(leaves["limit"]), leaves.get("radius"))
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), t["g"])]


@pytest.mark.parametrize("radius", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 3e-6), (BF16, 1e-2)])
def test_every_gradient_of_a_custom_angle(
    kernel: str, device: str, dtype: torch.dtype, tolerance: float, radius: bool
) -> None:
    t = inputs(device, dtype)
    found = gradients(by_kernel, t, radius=radius)
    expected = gradients(exact, {k: v.double() for k, v in t.items()}, radius=radius)
    for a, b in zip(found, expected, strict=True):
        largest = b.abs().amax(-1, keepdim=True) if b.dim() == 3 else b.abs()
        assert ((a.double() - b).abs() <= tolerance * largest).all(), (a, b)


def test_a_custom_angle_agrees_with_the_kernel_that_knows_the_angle(
    kernel: str, launch: ModuleType, device: str
) -> None:
    t = inputs(device)
    h, f, g = t["h"].requires_grad_(), t["f"].requires_grad_(), t["g"]
    p = torch.tensor([1.7], device=device, requires_grad=True)
    out = by_kernel(h, f, t["step"], lambda beta: p * torch.atan(beta / p))
    found = torch.autograd.grad(out, (h, f, p), g)
    settings: tuple[Any, ...] = t["step"], p, None, 1.0, False, None
    known, _, stats = launch.retract(h, f, *settings, None)
    dh, df, _, dp, *_ = launch.retract_backward(g, None, h, f, stats, *settings, None, True)
    torch.testing.assert_close(out, known, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, (dh, df, dp), rtol=1e-4, atol=1e-4)


def test_a_parameter_of_the_angle_per_row(kernel: str, device: str) -> None:
    t = inputs(device)
    t |= {"limit": torch.rand(2, 3, 1, device=device) + 1}
    found = gradients(by_kernel, t, radius=False)
    expected = gradients(exact, {k: v.double() for k, v in t.items()}, radius=False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_a_custom_angle_of_rows_without_direction_or_update(kernel: str, device: str) -> None:
    t = inputs(device)
    t["h"][0, 0], t["f"][0, 1] = 0, 0
    t["f"][0, 2] = 3 * t["h"][0, 2]
    found = gradients(by_kernel, t, radius=False)
    assert all(a.isfinite().all() for a in found)
    torch.testing.assert_close(found[0][0], t["h"][0])
    assert not found[2][0, 0].any() and found[2][0, 1].any()


def test_a_custom_angle_without_gradients(kernel: str, device: str) -> None:
    t = inputs(device)
    with torch.no_grad():
        out = by_kernel(t["h"], t["f"], t["step"], torch.tanh, torch.tensor([4.0], device=device))
    expected = retract_rows(t["h"].double(), t["f"].double(), 0.7, 1.0, 4.0, torch.tanh)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert by_kernel(t["h"][:, :0], t["f"][:, :0], t["step"], torch.tanh).shape == (2, 0, 20)


def test_a_second_derivative_of_a_custom_angle_is_refused(kernel: str, device: str) -> None:
    t = inputs(device)
    h = t["h"].requires_grad_()
    out = by_kernel(h, t["f"], t["step"], torch.tanh).sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out, h, create_graph=True)


def test_a_second_derivative_of_a_custom_angle_by_the_formulas() -> None:
    """As the error of the kernels advises."""
    h, f = rows(3, 5), rows(3, 5, seed=1)
    with spheret.backend("autograd"):
        (grad,) = torch.autograd.grad(
            spheret.retract(h, f, angle=torch.tanh).square()[:, 0].sum(), h, create_graph=True
        )
    assert torch.autograd.grad(grad.square().sum(), f)[0].isfinite().all()
