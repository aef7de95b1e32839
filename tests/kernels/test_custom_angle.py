"""Angle functions of the caller's between two kernels, against the float64 reference differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from spheret.geometry import Angle, retract_rows
from spheret.kernels import cpu, custom_angle, operator

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Retract = Callable[..., Tensor]


@pytest.fixture(params=["numba", "triton"])
def retract_with_angle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> Retract:
    if request.param == "triton":
        request.getfixturevalue("launch")
    elif device != "cpu" or cpu.unavailable():
        pytest.skip("the compiled loops run on the CPU, with Numba")
    monkeypatch.setattr(operator, "FORCED", request.param)
    return custom_angle.retract_with_angle


def capped(limit: Tensor) -> Angle:
    """theta grows no further than a learned limit."""
    return lambda beta: limit.to(beta.dtype) * torch.tanh(beta / limit.to(beta.dtype))


def inputs(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, f, g = (torch.randn(2, 3, 20, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(3))
    f[0] *= 1e-4
    f[1, 1:] *= 100
    scalars = {"step": [0.7], "limit": [1.3], "radius": [4.0]}
    return {"h": h, "f": f, "g": g} | {k: torch.tensor(v, device=device) for k, v in scalars.items()}


def gradients(retract: Retract, t: dict[str, Tensor], *, radius: bool) -> list[Tensor]:
    """Result and gradients of h, f, the step, the angle's limit, and the radius."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in t.items() if k != "g" and (radius or k != "radius")}
    out = retract(leaves["h"], leaves["f"], leaves["step"], capped(leaves["limit"]), leaves.get("radius"))
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), t["g"])]


def exact(h: Tensor, f: Tensor, step: Tensor, angle: Angle, radius: Tensor | None) -> Tensor:
    return retract_rows(h, f, step, 1.0, radius, angle)


@pytest.mark.parametrize("radius", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)]
)
def test_every_gradient(
    retract_with_angle: Retract, device: str, dtype: torch.dtype, tolerance: float, radius: bool
) -> None:
    t = inputs(device, dtype)
    if dtype == torch.float64:
        if operator.FORCED == "numba":
            pytest.skip("the loops compute in float32")
        t = {k: v.double() for k, v in t.items()}
    found = gradients(retract_with_angle, t, radius=radius)
    expected = gradients(exact, {k: v.double() for k, v in t.items()}, radius=radius)
    for a, b in zip(found, expected, strict=True):
        rows = b.abs().amax(-1, keepdim=True) if b.dim() == 3 else b.abs()
        assert ((a.double() - b).abs() <= tolerance * rows).all(), (a, b)


def test_agrees_with_the_kernel_that_knows_the_angle(
    retract_with_angle: Retract, launch: ModuleType, device: str
) -> None:
    t = inputs(device)
    h, f, g = t["h"].requires_grad_(), t["f"].requires_grad_(), t["g"]
    p = torch.tensor([1.7], device=device, requires_grad=True)
    out = retract_with_angle(h, f, 0.7, lambda beta: p * torch.atan(beta / p))
    found = torch.autograd.grad(out, (h, f, p), g)
    known, _, stats = launch.forward(h, f, 0.7, p)
    dh, df, sums = launch.backward(g, None, h, f, stats, 0.7, p)
    torch.testing.assert_close(out, known, rtol=1e-5, atol=1e-5)
    expected = (dh, df, sums[1].sum().reshape(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_parameter_of_the_angle_per_row(retract_with_angle: Retract, device: str) -> None:
    t = inputs(device)
    t |= {"limit": torch.rand(2, 3, 1, device=device) + 1}
    found = gradients(retract_with_angle, t, radius=False)
    expected = gradients(exact, {k: v.double() for k, v in t.items()}, radius=False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_rows_without_direction_or_update(retract_with_angle: Retract, device: str) -> None:
    t = inputs(device)
    t["h"][0, 0], t["f"][0, 1] = 0, 0
    t["f"][0, 2] = 3 * t["h"][0, 2]
    found = gradients(retract_with_angle, t, radius=False)
    assert all(a.isfinite().all() for a in found)
    torch.testing.assert_close(found[0][0], t["h"][0])
    assert not found[2][0, 0].any() and found[2][0, 1].any()


def test_without_gradients(retract_with_angle: Retract, device: str) -> None:
    t = inputs(device)
    with torch.no_grad():
        out = retract_with_angle(t["h"], t["f"], 0.7, torch.tanh, 4.0)
    expected = retract_rows(t["h"].double(), t["f"].double(), 0.7, 1.0, 4.0, torch.tanh)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert retract_with_angle(t["h"][:, :0], t["f"][:, :0], 0.7, torch.tanh).shape == (2, 0, 20)


def test_a_second_derivative_is_refused(retract_with_angle: Retract, device: str) -> None:
    t = inputs(device)
    h = t["h"].requires_grad_()
    out = retract_with_angle(h, t["f"], 0.7, torch.tanh).sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out, h, create_graph=True)
