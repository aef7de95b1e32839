"""The operators of float32 rows: their C kernels, those in Python that serve elsewhere, and the node over them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spheret
from spheret.geometry import LogExponent
from spheret.kernels import cpu, rows

pytestmark = pytest.mark.skipif(bool(cpu.unavailable()), reason=cpu.unavailable() or "Numba is here")


NewProcess = Callable[..., subprocess.CompletedProcess[str]]
Scalars = tuple[Tensor, Tensor, Tensor, float, bool, Tensor, bool]
FIXED, TENSOR, LOGARITHM = range(3)


def scalars(alpha: float, decay: float, p: float, radius: float | None, kind: int = FIXED) -> Scalars:
    """Of the operators; the exponent in one of three ways."""
    idle = torch.tensor([77.0])
    exponent = idle if kind == FIXED else torch.tensor([math.log(p) if kind == LOGARITHM else p])
    r = idle if radius is None else torch.tensor([radius])
    value = min(p, 1e30) if kind == FIXED else 0.0
    return torch.tensor([alpha]), torch.tensor([decay]), exponent, value, kind == LOGARITHM, r, radius is not None


def both_ways(h: Tensor, f: Tensor, g: Tensor, g2: Tensor, *values: Any) -> list[Tensor]:
    out, kept = rows.rotate_rows(h, f, *values)
    return [out, kept, *rows.rotate_rows_backward(g, g2, h, f, kept, *values)]


@pytest.fixture
def in_python() -> Iterator[None]:
    """The kernels that an older PyTorch has."""
    rows.kernels.use_python("a test")
    yield
    rows.kernels.why_not = ""


def test_c_kernels_serve_this_pytorch() -> None:
    h, f = torch.randn(2, 4), torch.randn(2, 4)
    spheret.retract(h, f, alpha=torch.ones(1))
    recent = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
    assert (rows.kernels.in_c is not None) == (recent and sys.platform == "linux"), rows.kernels.why_not
    assert spheret.which_backend(h, f).reason.endswith(rows.kernels.in_use())


@pytest.mark.usefixtures("in_python")
def test_dispatch_says_why_the_kernels_are_those_in_python() -> None:
    h, f = torch.randn(2, 4), torch.randn(2, 4)
    assert "kernels in Python (a test)" in spheret.which_backend(h, f).reason


CASES = [
    ((64, 96), (0.7, 0.5, 1.0, None), FIXED),
    ((3, 5, 7), (-0.7, 1.0, 2.5, 3.0), TENSOR),
    ((700, 48), (0.7, 0.5, math.inf, None), FIXED),
    ((64, 96), (0.7, 0.5, 1.5, None), LOGARITHM),
    ((4, 96), (0.7, 0.5, 1e-3, None), LOGARITHM),  # outside of the range in which a logarithm is held
    ((0, 8), (0.7, 0.5, 1.0, None), TENSOR),
    ((2, 0, 8), (0.7, 0.5, 1.0, 2.0), FIXED),
    ((9,), (0.7, 0.5, 1.0, None), LOGARITHM),
]


@pytest.mark.parametrize(("shape", "values", "kind"), CASES)
@pytest.mark.parametrize("two", [True, False])
def test_c_and_python_kernels_agree(
    shape: tuple[int, ...],
    values: tuple[float, float, float, float | None],
    kind: int,
    two: bool,
    request: pytest.FixtureRequest,
) -> None:
    h, f, g, g2 = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(4))
    g2 = g2 if two else torch.empty(0)
    ours = both_ways(h, f, g, g2, *scalars(*values, kind))
    request.getfixturevalue("in_python")
    theirs = both_ways(h, f, g, g2, *scalars(*values, kind))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        # The logarithm is raised in float64 there and in float32 here.
        torch.testing.assert_close(a, b, rtol=1e-5 if kind == LOGARITHM else 1e-6, atol=3e-6 * (kind == LOGARITHM))


@pytest.mark.parametrize("kind", [TENSOR, LOGARITHM])
def test_a_learned_exponent_is_the_fixed_one_of_its_value(kind: int) -> None:
    h, f, g = torch.randn(6, 20), torch.randn(6, 20), torch.randn(6, 20)
    fixed = both_ways(h, f, g, torch.empty(0), *scalars(0.7, 0.5, 1.5, 2.0))
    learned = both_ways(h, f, g, torch.empty(0), *scalars(0.7, 0.5, 1.5, 2.0, kind))
    torch.testing.assert_close(fixed[:5], learned[:5], rtol=1e-5, atol=1e-6)
    assert fixed[5] == 0 and learned[5] != 0


def test_gradient_of_a_logarithm_is_that_of_the_exponent_times_it() -> None:
    h, f = torch.randn(40, 20), torch.randn(40, 20)
    alpha, rho = torch.tensor([0.9]), torch.tensor([0.6], requires_grad=True)
    p = rho.detach().exp().requires_grad_()

    def loss(exponent: Tensor | LogExponent) -> Tensor:
        return spheret.retract(h, f, alpha=alpha, p=exponent)[:, 0].square().sum()

    (by_log,), (by_value,) = torch.autograd.grad(loss(LogExponent(rho)), rho), torch.autograd.grad(loss(p), p)
    torch.testing.assert_close(by_log, by_value * p)
    (first,) = torch.autograd.grad(loss(LogExponent(rho)), rho, create_graph=True)
    torch.testing.assert_close(first, by_log)
    assert torch.autograd.grad(first, rho)[0].isfinite().all()


def test_rows_that_are_not_contiguous_float32_are_copied() -> None:
    values = scalars(0.7, 0.5, 1.0, None)
    h, f = torch.randn(6, 10).t(), torch.randn(1, 6).expand(10, 6)
    g, g2 = torch.ones(1).expand(10, 6), torch.randn(10, 6, dtype=torch.float64)
    before = [t.clone() for t in (h, f, g, g2)]
    ours = both_ways(h, f, g, g2, *values)
    plain = both_ways(*(t.float().contiguous() for t in (h, f, g, g2)), *values)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((h, f, g, g2), before, strict=True))


def test_scalars_may_be_float64() -> None:
    h, f = torch.randn(4, 10), torch.randn(4, 10)
    single = scalars(0.75, 0.5, 1.5, 2.0, TENSOR)
    double = [v.double() if isinstance(v, Tensor) else v for v in single]
    assert torch.equal(rows.rotate_rows(h, f, *single)[0], rows.rotate_rows(h, f, *double)[0])


def test_opcheck() -> None:
    h, f, g = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)
    for kind in (FIXED, TENSOR, LOGARITHM):
        values = scalars(0.7, 0.5, 1.3, 2.0, kind)
        torch.library.opcheck(rows.rotate_rows, (h, f, *values))
        _, kept = rows.rotate_rows(h, f, *values)
        for g2 in (torch.randn(3, 8), torch.empty(0)):
            torch.library.opcheck(rows.rotate_rows_backward, (g, g2, h, f, kept, *values))


@pytest.mark.parametrize(
    "wrong",
    [
        {0: torch.randn(40_000, 8)},
        {1: torch.randn(2, 8)},
        {0: torch.randn(()), 1: torch.randn(())},
        {2: torch.empty(0)},
        {2: torch.ones(1, dtype=torch.bfloat16)},
        {4: torch.ones(2), 5: 0.0},
    ],
)
def test_arguments_that_do_not_fit_give_nothing_and_no_crash(wrong: dict[int, Any]) -> None:
    """Behind `spheret.retract`, which says what is wrong."""
    arguments: list[Any] = [torch.randn(4, 8), torch.randn(4, 8), *scalars(0.7, 0.5, 1.0, None)]
    assert rows.rotate_rows(*arguments)[0] is not None
    for i, value in wrong.items():
        arguments[i] = value
    assert rows.rotate_rows(*arguments) == (None, None)


def test_kept_numbers_may_come_back_in_another_layout() -> None:
    """As from a hook on saved tensors."""
    h, f, g = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8)
    values = scalars(0.7, 0.5, 1.0, None)
    _, kept = rows.rotate_rows(h, f, *values)
    expected = rows.rotate_rows_backward(g, g, h, f, kept, *values)
    other = torch.stack((kept, torch.zeros_like(kept)), dim=1)[:, 0]
    assert not other.is_contiguous()
    strided = rows.rotate_rows_backward(g, g, h, f, other, *values)
    assert all(torch.equal(a, b) for a, b in zip(expected, strided, strict=True))


@pytest.mark.parametrize("p", [torch.tensor([math.nan]), LogExponent(torch.tensor([math.nan]))])
def test_an_exponent_that_is_no_number_is_seen_in_the_result(p: Tensor | LogExponent) -> None:
    h, f = torch.randn(4, 8), torch.randn(4, 8)
    assert spheret.retract(h, f, alpha=torch.ones(1), p=p).isnan().all()


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_compiled_function_transforms(transform: str) -> None:
    h, f, alpha = torch.randn(4, 8), torch.randn(4, 8), torch.ones(1)

    def loss(h: Tensor) -> Tensor:
        return (spheret.retract(h, f[: h.shape[0]] if h.dim() > 1 else f[0], alpha=alpha) * torch.arange(8.0)).sum()

    transforms: dict[str, Callable[[Tensor], Any]] = {
        "grad": torch.func.grad(loss),
        "jvp": lambda h: torch.func.jvp(loss, (h,), (f,))[1],
        "vmap": torch.func.vmap(torch.func.grad(loss)),
    }
    torch._dynamo.reset()
    eager = transforms[transform](h)
    torch.testing.assert_close(torch.compile(transforms[transform])(h), eager, rtol=1e-4, atol=1e-5)
    assert eager.abs().max() > 0.1


def test_a_checkpoint_may_be_recomputed_under_a_mode_that_was_not_there() -> None:
    connection = spheret.build_connection("spheret:p=learn-per-layer", dim=8, layer_idx=1, n_layer=4)
    h, f = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    with FlopCounterMode(display=False):
        out = checkpoint(connection, h, f, use_reentrant=False)
    (grad,) = torch.autograd.grad(out[:, 0].sum(), h)
    (expected,) = torch.autograd.grad(connection(h, f)[:, 0].sum(), h)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("before", ["", "torch.set_default_dtype(torch.bfloat16)", "torch.set_default_device('meta')"])
def test_defaults_at_import_do_not_matter(before: str, in_new_process: NewProcess) -> None:
    code = (
        f"import torch\n{before}\nimport spheret\n"
        "make = dict(dtype=torch.float32, device='cpu')\n"
        "h, f, a = torch.randn(4, 8, **make), torch.randn(4, 8, **make), torch.ones(1, **make)\n"
        "results = [spheret.retract(h, f, alpha=a) for _ in range(3)]\n"
        "exact = spheret.retract(h.double(), f.double(), alpha=a.double())\n"
        "assert all(float((r - exact).abs().max()) < 1e-5 for r in results)\n"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


def test_a_child_of_a_fork_before_the_first_call(in_new_process: NewProcess) -> None:
    code = (
        "import os, torch, spheret\ntorch.set_num_threads(2); torch.randn(1000000).exp()\n"
        "h, f, a = torch.randn(160, 128), torch.randn(160, 128), torch.ones(1)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    [spheret.retract(h, f, alpha=a) for _ in range(3)]\n    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


def test_no_memory_is_an_error_and_not_a_crash() -> None:
    h = torch.ones(1).expand(1 << 44, 16)
    alpha = torch.ones(1, requires_grad=True)
    with pytest.raises((MemoryError, RuntimeError), match="memory"):
        spheret.retract(h, h, alpha=alpha)


def test_nothing_leaks(in_new_process: NewProcess) -> None:
    """The C kernels own the tensors that they are given, and give them back."""
    code = (
        "import resource, torch, spheret\n"
        "h, f, a = (torch.randn(s, requires_grad=True) for s in ((512, 512), (512, 512), (1,)))\n"
        "def step():\n"
        "    out, read = spheret.kernels.retract_for_two(h, f.t(), alpha=a)\n"
        "    torch.autograd.grad(out.sum() + (read * read).sum(), (h, f, a))\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(20): step()\n"
        "before = peak()\n"
        "for _ in range(200): step()\n"
        "assert peak() - before < 20_000, peak() - before\n"  # KiB; one tensor kept in each step would be 200,000
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


def test_first_calls_from_several_threads(in_new_process: NewProcess) -> None:
    """The C kernels are put in place at the first call, whoever makes it."""
    code = (
        "import torch, spheret\nfrom concurrent.futures import ThreadPoolExecutor\nfrom threading import Barrier\n"
        "h, f, a, gate = torch.randn(64, 32), torch.randn(64, 32), torch.ones(1), Barrier(8)\n"
        "def call(_):\n    gate.wait()\n    return spheret.retract(h, f, alpha=a)\n"
        "with ThreadPoolExecutor(8) as pool: results = list(pool.map(call, range(8)))\n"
        "assert all(torch.equal(r, results[0]) for r in results)\n"
        "assert torch.equal(spheret.retract(h, f, alpha=a), results[0])\n"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


def test_decay_is_a_factor_on_the_step() -> None:
    h, f, g = (torch.randn(5, 12) for _ in range(3))
    f.requires_grad_()
    decay = torch.tensor([0.5])
    for alpha in (torch.tensor([0.8], requires_grad=True), torch.full((5, 1), 0.8, requires_grad=True)):
        one = spheret.retract(h, f, alpha=alpha, decay=decay, p=1.5)
        two = spheret.retract(h, f, alpha=alpha * decay, p=1.5)
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(torch.autograd.grad(one, (f, alpha), g), torch.autograd.grad(two, (f, alpha), g))


def test_a_decay_that_learns_has_its_gradient() -> None:
    h, f = torch.randn(5, 12), torch.randn(5, 12)
    alpha, decay = torch.tensor([0.8]), torch.tensor([0.5], requires_grad=True)
    (grad,) = torch.autograd.grad(spheret.retract(h, f, alpha=alpha, decay=decay).square()[:, 0].sum(), decay)
    product = torch.tensor([0.4], requires_grad=True)
    (step,) = torch.autograd.grad(spheret.retract(h, f, alpha=product).square()[:, 0].sum(), product)
    torch.testing.assert_close(grad, step * alpha)


def test_compiled_code_calls_the_operator() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    connection = spheret.build_connection("proj", dim=8, layer_idx=1, n_layer=4)
    h, f = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    compiled = torch.compile(connection, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    out = compiled(h, f)
    out.sum().backward()
    called = {node.target for graph in graphs for node in graph.graph.nodes}
    assert {rows.rotate_rows, rows.rotate_rows_backward} <= called
    torch.testing.assert_close(out, connection(h, f))


@pytest.mark.parametrize("scheme", ["geonorm", "proj", "spheret:p=learn-per-layer"])
@pytest.mark.parametrize("strict", [True, False])
def test_exported_graphs_hold_finite_numbers_alone(scheme: str, strict: bool) -> None:
    """Packages of compiled models are JSON inside, which has no NaN and no infinity."""
    connection = spheret.build_connection(scheme, dim=8, layer_idx=1, n_layer=4)
    program = torch.export.export(connection, (torch.randn(3, 8), torch.randn(3, 8)), strict=strict)
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if "spheret" in str(node.target)]
    numbers = [a for node in nodes for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    assert nodes and numbers and all(math.isfinite(number) for number in numbers)
