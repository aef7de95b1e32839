"""The compiled CPU loops against float64, under every way in which PyTorch calls an operator."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import spheret
from spheret.kernels import cpu, operator

NewProcess = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.skipif(bool(cpu.unavailable()), reason=cpu.unavailable() or "Numba is here")


def inputs(*shape: int, seed: int = 0, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    h, f, g = (torch.randn(*shape, generator=generator) for _ in range(3))
    return (size * h).requires_grad_(), f.requires_grad_(), g


def run(
    h: torch.Tensor, f: torch.Tensor, g: torch.Tensor, alpha: float, p: float, radius: float | None
) -> list[torch.Tensor]:
    """Output and gradients of h, f, alpha, p and radius, all of them learned."""
    a, e = (torch.tensor([v], dtype=h.dtype, requires_grad=True) for v in (alpha, p))
    r = None if radius is None else torch.tensor([radius], dtype=h.dtype, requires_grad=True)
    out = spheret.retract(h, f, alpha=a, p=e, radius=r)
    wanted = [t for t in (h, f, a, e, r) if t is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, g)]


@pytest.mark.parametrize("d", [1, 2, 3, 7, 8, 33, 64, 1000, 1025])
@pytest.mark.parametrize("p", [0.3, 1.0, 2.0, 40.0])
@pytest.mark.parametrize("radius", [None, 3.0])
def test_every_width_against_float64(d: int, p: float, radius: float | None) -> None:
    h, f, g = inputs(5, d)
    assert spheret.which_backend(h, f).name == "numba"
    ours = run(h, f, g, 0.7, p, radius)
    h64, f64 = (t.detach().double().requires_grad_() for t in (h, f))
    exact = run(h64, f64, g.double(), 0.7, p, radius)
    for name, a, b in zip(("out", "h", "f", "alpha", "p", "radius"), ours, exact, strict=False):
        scale = max(float(b.abs().max()), 0.3 if d > 2 else 1.0)  # a sum over rows may cancel
        assert float((a.double() - b).abs().max()) < 3e-6 * scale, name


def test_infinite_p_and_float_scalars() -> None:
    h, f, g = inputs(6, 50)
    ours = torch.autograd.grad(spheret.retract(h, f, alpha=-0.4, p=math.inf, radius=2.0), (h, f), g)
    h64, f64 = (t.detach().double().requires_grad_() for t in (h, f))
    exact = torch.autograd.grad(spheret.retract(h64, f64, alpha=-0.4, p=math.inf, radius=2.0), (h64, f64), g.double())
    torch.testing.assert_close([t.double() for t in ours], list(exact), rtol=1e-5, atol=1e-6)


def test_both_directions_agree_with_the_autograd_path(monkeypatch: pytest.MonkeyPatch) -> None:
    h, f, g = inputs(4, 3, 20)
    ours = run(h, f, g, 0.7, 1.5, None)
    monkeypatch.setattr(operator, "FORCED", "autograd")
    assert spheret.which_backend(h, f).name == "autograd"
    torch.testing.assert_close(ours, run(h, f, g, 0.7, 1.5, None), rtol=1e-4, atol=1e-5)


def test_opcheck() -> None:
    h, f, _ = inputs(3, 8)
    step, p, radius = (torch.tensor([v], requires_grad=True) for v in (0.7, 1.3, 2.0))
    for arguments in (
        (h, f, step, 1.0, p, 1.0, radius, 0.0, torch.bfloat16),
        (h, f, None, 0.5, None, 2.0, None, 0.0, None),
    ):
        torch.library.opcheck(operator.retract_rows, arguments)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_threads_or_calls(threads: int) -> None:
    h, f, g = inputs(700, 96)  # large enough for the parallel loop
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(h, f, g, 0.7, 1.0, None)
        torch.set_num_threads(threads)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(h, f, g, 0.7, 1.0, None), expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_several_threads_may_call_at_once() -> None:
    h, f, _ = inputs(700, 96)
    with torch.no_grad():
        expected = spheret.retract(h, f)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: spheret.retract(h, f), range(32)))
    assert all(torch.equal(r, expected) for r in results)


def test_inputs_are_never_written_and_strides_do_not_matter() -> None:
    base_h, base_f = torch.randn(9, 6), torch.randn(1, 9).expand(6, 9)
    h = base_h.t().requires_grad_()
    before = h.detach().clone(), base_f.clone()
    out = spheret.retract(h, base_f)
    out.backward(torch.ones(1).expand(6, 9))
    assert torch.equal(h, before[0]) and torch.equal(base_f, before[1])
    assert torch.equal(out, spheret.retract(h.detach().contiguous(), base_f.contiguous()))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (4, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    h, f = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    alpha = torch.ones(1, requires_grad=True)
    out = spheret.retract(h, f, alpha=alpha)
    out.sum().backward()
    assert out.shape == h.shape and alpha.grad.isfinite().all() and h.grad.shape == h.shape


def test_nan_stays_in_its_row() -> None:
    h, f, _ = inputs(4, 16)
    with torch.no_grad():
        f[1, 3] = math.nan
        h[2, 5] = math.inf
        out = spheret.retract(h, f)
    assert out[1].isnan().any() and not out[2].isfinite().all()
    assert out[[0, 3]].isfinite().all()


def test_saved_for_backward() -> None:
    """h and f, which the neighbours keep anyway, and one float32 number per row."""
    h, f, _ = inputs(32, 256)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.append(t.numel() * t.element_size()), t)[1], lambda t: t
    ):
        spheret.retract(h, f, alpha=torch.ones(1, requires_grad=True))
    assert sum(sizes) <= 2 * 32 * 256 * 4 + 32 * 4 + 16


def test_second_derivative_in_float32() -> None:
    h, f, _ = inputs(3, 5)
    (grad,) = torch.autograd.grad(
        spheret.retract(h, f, alpha=0.7).square().sum() + spheret.retract(h, f)[0, 0], h, create_graph=True
    )
    (second,) = torch.autograd.grad(grad.square().sum(), f)
    h64, f64 = (t.detach().double().requires_grad_() for t in (h, f))
    out64 = spheret.retract(h64, f64, alpha=0.7).square().sum() + spheret.retract(h64, f64)[0, 0]
    (grad64,) = torch.autograd.grad(out64, h64, create_graph=True)
    (exact,) = torch.autograd.grad(grad64.square().sum(), f64)
    torch.testing.assert_close(second.double(), exact, rtol=1e-4, atol=1e-5)


def test_dispatch_says_why() -> None:
    h, f = torch.randn(2, 4), torch.randn(2, 4)
    assert spheret.which_backend(h, f).name == "numba"
    assert "float64" in spheret.which_backend(h.double(), f.double()).reason
    assert "row to row" in spheret.which_backend(h, f, alpha=torch.ones(2, 1)).reason
    assert spheret.which_backend(h, f, angle=torch.tanh).name == "numba"
    assert "meta" in spheret.which_backend(h.to("meta"), f.to("meta")).reason


def test_function_transforms() -> None:
    h, f = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(lambda h, f: spheret.retract(h, f))(h, f), spheret.retract(h, f))
    value, tangent = torch.func.jvp(lambda f: spheret.retract(h, f), (f,), (h,))
    torch.testing.assert_close(tangent, torch.zeros_like(h), rtol=0, atol=1e-6)  # the radial part of f does nothing
    jacobian = torch.func.jacrev(lambda h: spheret.retract(h, f[0]))(h[0])
    torch.testing.assert_close(jacobian.T @ value[0], h[0], rtol=1e-4, atol=1e-5)  # J_h^T h' = h


@pytest.mark.parametrize(("value", "expected"), [("numba", "cannot run here: float64"), ("cuda", "choose one of")])
def test_forced_backend_that_cannot_run_is_an_error(value: str, expected: str, in_new_process: NewProcess) -> None:
    code = "import torch, spheret; h = torch.ones(2, 4, dtype=torch.float64); spheret.retract(h, h)"
    out = in_new_process(code, SPHERET_BACKEND=value)
    assert out.returncode == 1 and expected in out.stderr


def test_without_numba_the_autograd_path_serves(in_new_process: NewProcess) -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'numba' else real(n, *a)\n"
        "import torch, spheret; h = torch.randn(2, 4); b = spheret.which_backend(h, h)\n"
        "assert b.name == 'autograd' and 'spheret[cpu]' in b.reason, b\n"
        "torch.testing.assert_close(spheret.retract(h, 2 * h), h)"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.7, 0.71, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("d", [16, 77])
def test_any_angle_between_state_and_update(cosine: float, d: int) -> None:
    """The loops treat updates beyond 45 degrees apart from the others; both must be right, and meet."""
    h, across = (t.detach().double() for t in inputs(64, d)[:2])
    across -= (across * h).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    across *= h.norm(dim=-1, keepdim=True) / across.norm(dim=-1, keepdim=True)
    h = h.float()
    f = (3 * (cosine * h + math.sqrt(1 - cosine**2) * across)).float()
    out = spheret.retract(h, f, alpha=0.5, p=1.0)
    expected = spheret.retract(h.double(), f.double(), alpha=0.5, p=1.0)
    assert (out - expected).norm() < 2e-7 * expected.norm()
    drift = (out.double().norm(dim=-1) / h.double().norm(dim=-1) - 1).abs().max()
    assert drift < 2.5e-7


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e8])
def test_norm_is_kept_where_the_update_is_parallel_and_large(ratio: float) -> None:
    h, _, g = inputs(16, 64)
    f = (ratio * h.detach()).requires_grad_()
    out = spheret.retract(h, f)
    torch.testing.assert_close(out.norm(dim=-1), h.norm(dim=-1), rtol=3e-7, atol=0)
    grads = torch.autograd.grad(out, (h, f), g)
    assert all(grad.isfinite().all() for grad in grads)


def test_a_fork_may_call_again(in_new_process: NewProcess) -> None:
    """The child of a fork has no thread of the parent's pool, and must not wait for one (PyTorch's own pool does)."""
    code = (
        "import os, torch, spheret; torch.set_num_threads(2)\n"
        "h, f = torch.randn(700, 96), torch.randn(700, 96); a = spheret.retract(h, f).numpy().tobytes()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if spheret.retract(h, f).numpy().tobytes() == a else 3)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


def test_a_radius_of_zero_is_a_radius() -> None:
    h, f, _ = inputs(3, 8)
    assert torch.equal(spheret.retract(h, f, radius=torch.zeros(1)), torch.zeros(3, 8))
