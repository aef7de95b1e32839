"""The door: which backend serves a call and what it says of itself, forcing one, checks, and function transforms."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import spheret

NewProcess = Callable[..., subprocess.CompletedProcess[str]]
needs_cpp = pytest.mark.usefixtures("compiled_kernel")
ONE = torch.ones(1)


class Operators(TorchDispatchMode):
    """The operators of spheret that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "spheret":
            self.called.append(func._schema.name.removeprefix("spheret::"))
        return func(*args, **(kwargs or {}))


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, f = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return h, f


# --- what serves a call ---

SCALARS: dict[str, Callable[[], dict[str, Any]]] = {
    "defaults": dict,
    "floats": lambda: {"alpha": 0.7, "p": 1.3, "radius": 2.0},
    "integers": lambda: {"alpha": 1, "p": 2, "radius": 3},
    "infinite p": lambda: {"p": math.inf},
    "tensors": lambda: {"alpha": 0.7 * ONE, "p": 1.3 * ONE, "radius": 2 * ONE},
    "0-d": lambda: {"alpha": torch.tensor(0.7), "p": torch.tensor(1.3), "radius": torch.tensor(2.0)},
    "float64": lambda: {"alpha": torch.tensor([0.7], dtype=torch.float64), "p": 1.3},
    "0-d float64": lambda: {"alpha": torch.tensor(0.7, dtype=torch.float64)},
    "bfloat16": lambda: {"alpha": torch.tensor([0.75], dtype=torch.bfloat16)},
    "learned": lambda: {"alpha": (0.7 * ONE).requires_grad_(), "p": (1.3 * ONE).requires_grad_()},
    "0-d learned": lambda: {"alpha": torch.tensor(0.7, requires_grad=True)},
    "angle": lambda: {"alpha": 0.7, "angle": torch.tanh},
    "angle and learned step": lambda: {"alpha": (0.7 * ONE).requires_grad_(), "angle": torch.tanh},
    "step per row": lambda: {"alpha": torch.full((4, 1), 0.7)},
    "p per row": lambda: {"p": torch.full((4, 1), 1.3)},
}
PER_ROW = ("step per row", "p per row")


@needs_cpp
@pytest.mark.parametrize("forced", ["auto", "autograd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scalars", SCALARS)
def test_which_backend_tells_the_truth(scalars: str, dtype: torch.dtype, forced: str) -> None:
    h, f = pair(4, 8, dtype=dtype)
    h.requires_grad_()
    values = SCALARS[scalars]()
    with spheret.backend(forced), Operators() as counted:
        told = spheret.which_backend(h, f, **values).name
        spheret.retract(h, f, **values)[:, 0].sum().backward()
    expected = {"update_size", "retract", "retract_backward"} if "angle" in values else {"retract", "retract_backward"}
    if told != "cpp":
        expected = set()
    assert set(counted.called) == expected
    served = forced == "auto" and dtype != torch.float64 and scalars not in PER_ROW
    assert (told == "cpp") == served  # the same for floats and tensors


@needs_cpp
@pytest.mark.parametrize("scalars", ["0-d", "float64", "floats", "tensors"])
def test_what_a_scalar_is_made_of_does_not_matter(scalars: str) -> None:
    h, f = pair(4, 8)
    values = {"alpha": 0.75, "p": 1.25, "radius": 2.0}
    make = {
        "floats": lambda v: v,
        "tensors": lambda v: torch.tensor([v]),
        "0-d": torch.tensor,
        "float64": lambda v: torch.tensor([v], dtype=torch.float64),
    }[scalars]
    assert torch.equal(
        spheret.retract(h, f, **{k: make(v) for k, v in values.items()}), spheret.retract(h, f, **values)
    )


@needs_cpp
def test_dispatch_says_why() -> None:
    h, f = pair(2, 4)
    assert spheret.which_backend(h, f).name == "cpp"
    assert "float64" in spheret.which_backend(h.double(), f.double()).reason
    assert "row to row" in spheret.which_backend(h, f, alpha=torch.ones(2, 1)).reason
    assert spheret.which_backend(h, f, angle=torch.tanh).name == "cpp"
    assert "meta" in spheret.which_backend(h.to("meta"), f.to("meta")).reason
    assert "not on cpu" in spheret.which_backend(h, f, alpha=ONE.to("meta")).reason
    with spheret.backend("autograd"):
        assert spheret.which_backend(h, f) == ("autograd", "forced")
        assert spheret.which_backend(h, f, angle=torch.tanh) == ("autograd", "forced")


@needs_cpp
def test_a_kernel_says_how_it_runs() -> None:
    reason = spheret.which_backend(*pair(2, 4)).reason
    assert "float32 on cpu" in reason and "instructions" in reason and "threads" in reason


@needs_cpp
def test_meta_tensors_are_served_by_the_formulas() -> None:
    h, f = (t.to("meta") for t in pair(2, 4))
    assert spheret.retract(h, f, alpha=0.5).shape == (2, 4)


# --- forcing one ---


@needs_cpp
def test_a_forced_backend_ends_with_its_block() -> None:
    h, f = pair(2, 4)
    with spheret.backend("autograd"):
        with spheret.backend("cpp"):
            assert spheret.which_backend(h, f).name == "cpp"
        assert spheret.which_backend(h, f).name == "autograd"
        with pytest.raises(ZeroDivisionError), spheret.backend("auto"):
            raise ZeroDivisionError
        assert spheret.which_backend(h, f).name == "autograd"
    assert spheret.which_backend(h, f).name == "cpp"


@needs_cpp
def test_a_forced_backend_holds_in_other_threads() -> None:
    h, f = pair(2, 4)
    with spheret.backend("autograd"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(spheret.which_backend, h, f).result().name == "autograd"


def test_an_unknown_backend_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'cuda'.*choose one of auto, cpp, triton, autograd"), spheret.backend("cuda"):
        pass


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("cpp", {"dtype": torch.float64}, "float64"),
        ("cpp", {"alpha": torch.ones(2, 1)}, "row to row"),
        ("triton", {"alpha": torch.ones(2, 1)}, "row to row"),
    ],
)
def test_a_forced_backend_that_cannot_serve_raises(name: str, arguments: dict[str, Any], why: str) -> None:
    h, f = pair(2, 4, dtype=arguments.pop("dtype", torch.float32))
    with spheret.backend(name):
        for call in (spheret.retract, spheret.which_backend):
            with pytest.raises(RuntimeError, match=f"'{name}' cannot serve this call: .*{why}"):
                call(h, f, **arguments)


def test_the_environment_forces_a_backend(in_new_process: NewProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch, spheret; h = torch.ones(2, 4, dtype=torch.float64); spheret.retract(h, h)"
    out = in_new_process(code, SPHERET_BACKEND="cpp")
    assert out.returncode == 1 and "cannot serve this call: float64" in out.stderr
    monkeypatch.setattr(sys.modules["spheret.kernels.retract"], "_forced", "cuda")  # as read at import
    with pytest.raises(RuntimeError, match="SPHERET_BACKEND='cuda': choose one of"):
        spheret.retract(*pair(2, 4))


# --- arguments ---

H = torch.randn(3, 4)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shapes": ({"f": torch.randn(3, 5)}, ValueError, r"\(3, 4\) but f has \(3, 5\)"),
    "no dimension": ({"h": torch.randn(()), "f": torch.randn(())}, ValueError, "last dimension of at least 1"),
    "no numbers": ({"h": torch.randn(3, 0), "f": torch.randn(3, 0)}, ValueError, "last dimension of at least 1"),
    "integers": ({"h": torch.ones(3, 4, dtype=torch.long)}, TypeError, r"h has dtype torch.int64.*h.float\(\)"),
    "integer update": ({"f": torch.ones(3, 4, dtype=torch.long)}, TypeError, "f has dtype torch.int64"),
    "p = 0": ({"p": 0.0}, ValueError, r"p = 0.0: .*\(0, inf\]"),
    "p < 0": ({"p": -1}, ValueError, "p = -1"),
    "p is NaN": ({"p": math.nan}, ValueError, "p = nan"),
    "radius 0": ({"radius": 0.0}, ValueError, "radius = 0.0"),
    "radius infinite": ({"radius": math.inf}, ValueError, "radius = inf"),
    "a step for every number": ({"alpha": torch.ones(3, 4)}, ValueError, r"alpha has shape \(3, 4\)"),
    "a p for every number": ({"p": torch.ones(4)}, ValueError, r"p has shape \(4,\)"),
    "a radius of more dimensions": ({"radius": torch.ones(1, 3, 1)}, ValueError, r"radius has shape \(1, 3, 1\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_the_value(wrong: str) -> None:
    changes, error, message = WRONG[wrong]
    arguments = {"h": H, "f": H} | changes
    with pytest.raises(error, match=message):
        spheret.retract(arguments.pop("h"), arguments.pop("f"), **arguments)


@needs_cpp
def test_infinite_p_and_float_scalars() -> None:
    h, f = pair(6, 50)
    g = torch.randn(6, 50)
    h.requires_grad_(), f.requires_grad_()
    ours = torch.autograd.grad(spheret.retract(h, f, alpha=-0.4, p=math.inf, radius=2.0), (h, f), g)
    h64, f64 = (t.detach().double().requires_grad_() for t in (h, f))
    exact = torch.autograd.grad(spheret.retract(h64, f64, alpha=-0.4, p=math.inf, radius=2.0), (h64, f64), g.double())
    torch.testing.assert_close([t.double() for t in ours], list(exact), rtol=1e-5, atol=1e-6)


@needs_cpp
def test_defaults_at_import_do_not_matter(in_new_process: NewProcess) -> None:
    code = (
        "import torch\ntorch.set_default_dtype(torch.bfloat16)\ntorch.set_default_device('meta')\nimport spheret\n"
        "make = dict(dtype=torch.float32, device='cpu')\n"
        "h, f, a = torch.randn(4, 8, **make), torch.randn(4, 8, **make), torch.ones(1, **make)\n"
        "results = [spheret.retract(h, f, alpha=alpha) for alpha in (a, 1.0, a)]\n"
        "exact = spheret.retract(h.double(), f.double(), alpha=a.double())\n"
        "assert all(float((r - exact).abs().max()) < 1e-5 for r in results)\n"
    )
    out = in_new_process(code)
    assert out.returncode == 0, out.stderr


@needs_cpp
def test_first_calls_from_several_threads(in_new_process: NewProcess) -> None:
    """The C++ kernel is loaded at the first call, whoever makes it."""
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


# --- function transforms ---


def test_function_transforms() -> None:
    h, f = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(lambda h, f: spheret.retract(h, f))(h, f), spheret.retract(h, f))
    value, tangent = torch.func.jvp(lambda f: spheret.retract(h, f), (f,), (h,))
    torch.testing.assert_close(tangent, torch.zeros_like(h), rtol=0, atol=1e-6)  # the radial part of f does nothing
    jacobian = torch.func.jacrev(lambda h: spheret.retract(h, f[0]))(h[0])
    torch.testing.assert_close(jacobian.T @ value[0], h[0], rtol=1e-4, atol=1e-5)  # J_h^T h' = h


def test_which_backend_inside_a_function_transform() -> None:
    told = []

    def call(h: Tensor) -> Tensor:
        told.append(spheret.which_backend(h, h))
        return spheret.retract(h, 2 * h)

    torch.func.vmap(call)(H)
    assert told == [("autograd", "inside a torch.func transform")] != [spheret.which_backend(H, H)]


@pytest.mark.usefixtures("cxx_compiler")
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


@pytest.mark.parametrize("name", ["alpha", "p"])
def test_none_for_a_scalar_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is None: give a number or a tensor"):
        spheret.retract(*pair(2, 3), **{name: None})
