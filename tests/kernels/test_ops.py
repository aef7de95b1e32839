"""The C++ operators against float64, and everything in which a kernel differs from a formula: layouts, memory, threads,
forks, arguments that do not fit, and the bits of its results."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import spheret
from spheret.geometry import exponent_from_log, retract_rows, retract_vjp
from spheret.kernels.ops import OPERATORS

NewProcess = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.usefixtures("compiled_kernel")
BF16, F64 = torch.bfloat16, torch.float64


def inputs(*shape: int, seed: int = 0, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    h, f, g = (torch.randn(*shape, generator=generator) for _ in range(3))
    return (size * h).requires_grad_(), f.requires_grad_(), g


def run(h: Tensor, f: Tensor, g: Tensor, alpha: float, p: float, radius: float | None) -> list[Tensor]:
    """Output and gradients of h, f, alpha, p and radius, all of them learned."""
    a, e = (torch.tensor([v], dtype=h.dtype, requires_grad=True) for v in (alpha, p))
    r = None if radius is None else torch.tensor([radius], dtype=h.dtype, requires_grad=True)
    out = spheret.retract(h, f, alpha=a, p=e, radius=r)
    wanted = [t for t in (h, f, a, e, r) if t is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, g)]


Scalars = tuple[Tensor, Tensor, Tensor | None, float, bool]


def scalars(alpha: float, lambda_l: float, p: float, radius: float | None, log_p: bool = False) -> Scalars:
    """As the operators take them."""
    r = None if radius is None else torch.tensor([radius])
    return torch.tensor([alpha]), torch.tensor([math.log(p) if log_p else p]), r, lambda_l, log_p


def both_ways(h: Tensor, f: Tensor, g: Tensor, g_branch: Tensor | None, values: Scalars) -> list[Tensor]:
    """What both operators return, in their order."""
    out, branch, kept = OPERATORS.retract(h, f, *values, None, None)
    backward = OPERATORS.retract_backward(g, g_branch, h, f, kept, *values, None, None, True)
    return [out, branch, kept, *backward]


# --- results ---


@pytest.mark.parametrize("d", [1, 2, 3, 7, 8, 33, 64, 1000, 1025])
@pytest.mark.parametrize("p", [0.3, 1.0, 2.0, 40.0])
@pytest.mark.parametrize("radius", [None, 3.0])
def test_every_width_against_float64(d: int, p: float, radius: float | None) -> None:
    h, f, g = inputs(5, d)
    assert spheret.which_backend(h, f).name == "cpp"
    ours = run(h, f, g, 0.7, p, radius)
    h64, f64 = (t.detach().double().requires_grad_() for t in (h, f))
    exact = run(h64, f64, g.double(), 0.7, p, radius)
    for name, a, b in zip(("out", "h", "f", "alpha", "p", "radius"), ours, exact, strict=False):
        scale = max(float(b.abs().max()), 0.3 if d > 2 else 1.0)  # a sum over rows may cancel
        assert float((a.double() - b).abs().max()) < 3e-6 * scale, name


CASES = [
    ((64, 96), (0.7, 0.5, 1.0, None), False),
    ((3, 5, 7), (-0.7, 1.0, 2.5, 3.0), False),
    ((700, 48), (0.7, 0.5, 1e30, None), False),
    ((64, 96), (0.7, 0.5, 1.5, None), True),
    ((4, 96), (0.7, 0.5, 1e-3, None), True),  # outside of the range in which a logarithm is held
    ((0, 8), (0.7, 0.5, 1.0, None), False),
    ((2, 0, 8), (0.7, 0.5, 1.0, 2.0), False),
    ((9,), (0.7, 0.5, 1.0, None), True),
]
CASES += [((5, d), (0.7, 1.0, 0.3, 3.0), False) for d in (1, 2, 3, 7, 8, 33, 64, 1000, 1025)]


@pytest.mark.parametrize(("shape", "values", "log_p"), CASES)
@pytest.mark.parametrize("two", [True, False])
def test_operators_are_the_formulas(
    shape: tuple[int, ...], values: tuple[float, float, float, float | None], log_p: bool, two: bool
) -> None:
    h, f, g, g_branch = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(4))
    out, branch, kept, *found = both_ways(h, f, g, g_branch if two else None, scalars(*values, log_p))
    alpha, lambda_l, p, radius = values
    exponent = torch.tensor([math.log(p) if log_p else p], dtype=F64)
    if log_p:
        exponent = exponent_from_log(exponent)
    wide = [t.double() for t in (g + g_branch if two else g, h, f)]
    grads = retract_vjp(*wide, alpha * lambda_l, exponent, radius, need_p=True)
    assert grads.p is not None
    of_scalars = [lambda_l * grads.step, grads.p * (exponent if log_p else 1)]
    of_scalars.append(torch.zeros(0, dtype=F64) if grads.radius is None else grads.radius)
    exact = [retract_rows(*wide[1:], alpha * lambda_l, exponent, radius), grads.h, grads.f]
    sizes = [float(t.abs().max()) if t.numel() else 0.0 for t in exact]
    exact += [t.sum().reshape(1) if t.dim() > 1 or t.numel() else t for t in of_scalars]
    sizes += [float(t.abs().sum()) for t in of_scalars]  # rows may cancel
    assert branch.shape == (0,) and kept.shape == (math.prod(shape[:-1]),) and found.pop().shape == (0,)
    for a, b, size in zip((out, *found), exact, sizes, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and a.is_contiguous()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-6 * max(0.3 if shape[-1] > 2 else 1.0, size))


def test_both_directions_agree_with_the_autograd_path() -> None:
    h, f, g = inputs(4, 3, 20)
    ours = run(h, f, g, 0.7, 1.5, None)
    with spheret.backend("autograd"):
        assert spheret.which_backend(h, f).name == "autograd"
        torch.testing.assert_close(ours, run(h, f, g, 0.7, 1.5, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.7, 0.71, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("d", [16, 77])
def test_any_angle_between_state_and_update(cosine: float, d: int) -> None:
    """The kernel treats updates beyond 45 degrees apart from the others; both must be right, and meet."""
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


@pytest.mark.parametrize(
    ("h_size", "f_size"), [(1e-30, 1e-30), (1e30, 1e30), (1e-30, 1e-33), (1e-20, 1e-12), (1, 1e-30)]
)
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_rows_whose_squares_leave_float32(h_size: float, f_size: float, p: float) -> None:
    h, f, g = inputs(6, 40)
    h, f = (h_size * h).detach().requires_grad_(), (f_size * f).detach().requires_grad_()
    out = spheret.retract(h, f, alpha=0.7, p=p)
    ours = [out.detach(), *torch.autograd.grad(out, (h, f), g)]
    h64, f64 = h.detach().double().requires_grad_(), f.detach().double().requires_grad_()
    exact_out = spheret.retract(h64, f64, alpha=0.7, p=p)
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, (h64, f64), g.double())]
    for a, b in zip(ours, exact, strict=True):
        assert float((a.double() - b).abs().max()) < 3e-6 * float(b.abs().max()) + 1e-38


def test_nan_stays_in_its_row() -> None:
    h, f, _ = inputs(4, 16)
    with torch.no_grad():
        f[1, 3] = math.nan
        h[2, 5] = math.inf
        out = spheret.retract(h, f)
    assert out[1].isnan().any() and not out[2].isfinite().all()
    assert out[[0, 3]].isfinite().all()


def test_a_radius_of_zero_is_a_radius() -> None:
    h, f, _ = inputs(3, 8)
    assert torch.equal(spheret.retract(h, f, radius=torch.zeros(1)), torch.zeros(3, 8))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (4, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    h, f = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    alpha = torch.ones(1, requires_grad=True)
    out = spheret.retract(h, f, alpha=alpha)
    out.sum().backward()
    assert out.shape == h.shape and alpha.grad.isfinite().all() and h.grad.shape == h.shape


@pytest.mark.parametrize("branch_dtype", [BF16, torch.float16, F64])
def test_the_branch_is_the_stream_in_another_dtype(branch_dtype: torch.dtype) -> None:
    h, f, _ = inputs(6, 40)
    out, branch, _ = OPERATORS.retract(h, f, *scalars(0.7, 0.5, 1.5, 2.0), None, branch_dtype)
    assert torch.equal(branch, out.to(branch_dtype)) and branch.dtype == branch_dtype


def test_update_size_is_that_of_the_reference() -> None:
    h, f, _ = inputs(6, 40)
    wide = [t.detach().double() for t in (h, f)]
    tangent = wide[1] - (wide[0] * wide[1]).sum(-1, keepdim=True) / (wide[0] ** 2).sum(-1, keepdim=True) * wide[0]
    exact = 0.7 * tangent.norm(dim=-1) / wide[0].norm(dim=-1)
    found = OPERATORS.update_size(h, f, torch.tensor([-0.7]))
    assert found.dtype == F64
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


# --- the contract of an operator ---


def test_opcheck() -> None:
    h, f, g = (t.detach() for t in inputs(3, 8))
    for values, branch_dtype in (
        (scalars(0.7, 1.0, 1.3, 2.0), BF16),
        (scalars(0.7, 0.5, 2.0, None), None),
        (scalars(0.7, 0.5, 1.3, 2.0, log_p=True), None),
    ):
        torch.library.opcheck(OPERATORS.retract, (h, f, *values, None, branch_dtype))
        _, _, kept = OPERATORS.retract(h, f, *values, None, None)
        for g_branch in (torch.randn(3, 8), None):
            torch.library.opcheck(
                OPERATORS.retract_backward, (g, g_branch, h, f, kept, *values, None, None, branch_dtype is None)
            )
    theta, slope = torch.rand(3), torch.rand(3)
    torch.library.opcheck(OPERATORS.retract, (h, f, *values, theta, None))
    torch.library.opcheck(OPERATORS.retract_backward, (g, None, h, f, kept, *values, theta, slope, True))
    torch.library.opcheck(OPERATORS.update_size, (h, f, values[0]))


WRONG: dict[str, dict[str, Any]] = {
    "more rows in h": {"h": torch.randn(40_000, 8)},
    "fewer rows in f": {"f": torch.randn(2, 8)},
    "no dimension": {"h": torch.randn(()), "f": torch.randn(())},
    "no numbers in a row": {"h": torch.randn(4, 0), "f": torch.randn(4, 0)},
    "float64 rows": {"h": torch.randn(4, 8, dtype=F64)},
    "no alpha": {"alpha": torch.empty(0)},
    "two exponents": {"p": torch.ones(2)},
    "two radii": {"radius": torch.ones(2)},
    "angles of other rows": {"theta": torch.ones(3)},
}
WRONG_BACKWARD: dict[str, dict[str, Any]] = WRONG | {
    "gradient of another shape": {"g": torch.randn(4, 9)},
    "gradient of one row": {"g": torch.randn(8)},
    "gradient of the branch of another shape": {"g_branch": torch.randn(3, 8)},
    "kept of other rows": {"kept": torch.ones(5)},
    "nothing kept": {"kept": torch.empty(0)},
    "slopes of other rows": {"theta": torch.ones(4), "slope": torch.ones(1000)},
}


def arguments() -> dict[str, Any]:
    h, f, g = (t.detach() for t in inputs(4, 8))
    alpha, p, radius, lambda_l, log_p = scalars(0.7, 0.5, 1.0, 2.0)
    of_forward = {"h": h, "f": f, "alpha": alpha, "p": p, "radius": radius, "lambda_l": lambda_l, "log_p": log_p}
    kept = OPERATORS.retract(h, f, alpha, p, radius, lambda_l, log_p, None, None)[2]
    return of_forward | {"theta": None, "g": g, "g_branch": None, "kept": kept, "slope": None, "need_p": True}


def of_retract(a: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in a.items() if k not in ("g", "g_branch", "kept", "slope", "need_p")} | {
        "branch_dtype": None
    }


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_do_not_fit_raise_and_do_not_crash(wrong: str) -> None:
    OPERATORS.retract(**of_retract(arguments()))
    with pytest.raises(RuntimeError):
        OPERATORS.retract(**of_retract(arguments() | WRONG[wrong]))


@pytest.mark.parametrize("wrong", WRONG_BACKWARD)
def test_gradients_that_do_not_fit_raise_and_do_not_crash(wrong: str) -> None:
    OPERATORS.retract_backward(**arguments())
    with pytest.raises(RuntimeError):
        OPERATORS.retract_backward(**(arguments() | WRONG_BACKWARD[wrong]))


@pytest.mark.parametrize("wrong", ["fewer rows in f", "no dimension", "float64 rows", "no alpha"])
def test_an_update_that_does_not_fit_has_no_size(wrong: str) -> None:
    named = arguments() | WRONG[wrong]
    with pytest.raises(RuntimeError):
        OPERATORS.update_size(named["h"], named["f"], named["alpha"])


# --- layouts and memory ---


def test_inputs_are_never_written_and_strides_do_not_matter() -> None:
    base_h, base_f = torch.randn(9, 6), torch.randn(1, 9).expand(6, 9)
    h = base_h.t().requires_grad_()
    before = h.detach().clone(), base_f.clone()
    out = spheret.retract(h, base_f)
    out.backward(torch.ones(1).expand(6, 9))
    assert torch.equal(h, before[0]) and torch.equal(base_f, before[1])
    assert torch.equal(out, spheret.retract(h.detach().contiguous(), base_f.contiguous()))


def test_rows_that_are_not_contiguous_float32_are_copied() -> None:
    values = scalars(0.7, 0.5, 1.0, None)
    h, f = torch.randn(6, 10).t(), torch.randn(1, 6).expand(10, 6)
    g, g_branch = torch.ones(1).expand(10, 6), torch.randn(10, 6, dtype=F64)
    before = [t.clone() for t in (h, f, g, g_branch)]
    ours = both_ways(h, f, g, g_branch, values)
    plain = both_ways(*(t.float().contiguous() for t in (h, f, g, g_branch)), values)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((h, f, g, g_branch), before, strict=True))


def test_scalars_may_be_float64() -> None:
    h, f, g = (t.detach() for t in inputs(4, 10))
    single = scalars(0.75, 0.5, 1.5, 2.0)
    double = tuple(v.double() if isinstance(v, Tensor) else v for v in single)
    for a, b in zip(both_ways(h, f, g, None, single), both_ways(h, f, g, None, double), strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert [t.dtype for t in both_ways(h, f, g, None, double)[5:8]] == [F64] * 3


def test_kept_numbers_may_come_back_in_another_layout() -> None:
    """As from a hook on saved tensors."""
    h, f, g = (t.detach() for t in inputs(6, 8))
    values = scalars(0.7, 0.5, 1.0, None)
    _, _, kept = OPERATORS.retract(h, f, *values, None, None)
    other = torch.stack((kept, torch.zeros_like(kept)), dim=1)[:, 0]
    assert not other.is_contiguous()
    expected, strided = (
        OPERATORS.retract_backward(g, g, h, f, numbers, *values, None, None, True) for numbers in (kept, other)
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, strided, strict=True))


def test_no_memory_is_an_error_and_not_a_crash() -> None:
    h = torch.ones(1).expand(1 << 44, 16)
    alpha = torch.ones(1, requires_grad=True)
    with pytest.raises((MemoryError, RuntimeError), match="memory"):
        spheret.retract(h, h, alpha=alpha)


def test_nothing_leaks(in_new_process: NewProcess) -> None:
    code = (
        "import resource, torch, spheret\n"
        "h, f, a = (torch.randn(s, requires_grad=True) for s in ((512, 512), (512, 512), (1,)))\n"
        "def step():\n"
        "    out, branch = spheret.kernels.rotate(h, f.t(), a, 1.0, branch_dtype=torch.float32)\n"
        "    torch.autograd.grad(out.sum() + (branch * branch).sum(), (h, f, a))\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(20): step()\n"
        "before = peak()\n"
        "for _ in range(200): step()\n"
        "assert peak() - before < 20_000, peak() - before\n"  # KiB; one tensor kept in each step would be 200,000
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


# --- the same bits ---

# Both directions of the two-output form at a few shapes, one of them large enough for a second thread, as bytes. The
# results of the first call are written before a second one is made.
BYTES = """
import torch, spheret

def results():
    found = b""
    for shape, scheme in (((5, 7), "proj"), ((700, 96), "spheret:p=learn-per-layer"), ((40, 1000), "geonorm")):
        torch.manual_seed(0)
        connection = spheret.build_connection(scheme, dim=shape[1], layer_idx=2, n_layer=4)
        h, f = (torch.randn(shape, requires_grad=True) for _ in range(2))
        f.data[::3] += 4 * h.data[::3]
        stream, branch = connection(h, f, split=True)
        leaves = [h, f, *connection.parameters()]
        gradients = torch.autograd.grad((stream, branch), leaves, (torch.randn(shape), torch.randn(shape)))
        once = spheret.retract(h, f, alpha=0.7, p=1.3)
        found += b"".join(t.detach().numpy().tobytes() for t in (stream, branch, *gradients, once))
    return found
"""
DIGEST = "\nimport hashlib\nprint(*(hashlib.sha256(results()).hexdigest() for _ in range(3)))"


def bytes_here() -> bytes:
    names: dict[str, Any] = {}
    exec(BYTES, names)
    return names["results"]()


def test_every_call_of_every_process_gives_the_same_bits(in_new_process: NewProcess) -> None:
    here = hashlib.sha256(bytes_here()).hexdigest()
    assert here == hashlib.sha256(bytes_here()).hexdigest()
    for threads in ("1", "2"):
        out = in_new_process(BYTES + DIGEST, OMP_NUM_THREADS=threads)
        assert out.returncode == 0, out.stderr
        assert out.stdout.split() == [here] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_child_of_a_fork_gives_the_same_bits(in_new_process: NewProcess) -> None:
    """Whether or not the parent has used the kernel or its threads, of which the child has none and must wait for
    none. It says so."""
    code = (
        BYTES + "import os, hashlib\n"
        "def fork(before):\n"
        "    before()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        torch.set_num_threads(2)\n"
        "        [results() for _ in range(2)]\n"
        "        how = spheret.which_backend(torch.ones(2, 4), torch.ones(2, 4)).reason.split(', ')[-1]\n"
        "        os.write(1, f'{hashlib.sha256(results()).hexdigest()} {how}\\n'.encode())\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "fork(lambda: None)\n"
        "torch.set_num_threads(2)\n"
        "fork(results)\n"
        "fork(lambda: torch.randn(1000000).exp())\n"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr
    here = hashlib.sha256(bytes_here()).hexdigest()
    alone = "one thread after a fork"
    assert out.stdout.splitlines() == [f"{here} all threads", f"{here} {alone}", f"{here} {alone}"]


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
