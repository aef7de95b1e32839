"""The Triton kernels against the float64 reference, row by row and dtype by dtype."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import spheret
from spheret.geometry import compute_dtype, retract_rows, retract_vjp, rows
from spheret.kernels import rotate
from spheret.kernels.ops import OPERATORS

# NumPy, which stands for the GPU in the interpreter, reports what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
NAMES = ("out", "dh", "df", "alpha", "p", "radius")


def tensors(*shape: int, device: str, dtypes: tuple[torch.dtype, ...] = (F32, F32, F32), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=F64).to(device, dtype) for dtype in dtypes]


# Connections of the tests of drift: a hundred show what a thousand do, and the interpreter takes its time.
IN_A_ROW = 1000 if torch.cuda.is_available() else 100

Value = float | Tensor | None


def scalar(value: Value, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """As the launches take it."""
    made = isinstance(value, Tensor) or value is None
    return value if made else torch.tensor([value], device=like.device, dtype=dtype)


def settings(h: Tensor, f: Tensor, alpha: Value, p: Value, radius: Value, lambda_l: float = 1.0) -> tuple[Any, ...]:
    """From alpha to theta, in the order of the operators."""
    dtype = compute_dtype(h, f)
    alpha, p, radius = (scalar(value, h, dtype) for value in (alpha, p, radius))
    return alpha, p, radius, lambda_l, False, None


def forward(launch: ModuleType, h: Tensor, f: Tensor, alpha: Value, p: Value, radius: Value = None) -> Tensor:
    return launch.retract(h, f, *settings(h, f, alpha, p, radius), None)[0]


def ours(launch: ModuleType, h: Tensor, f: Tensor, g: Tensor, alpha: Value, p: Value, radius: Value) -> list[Tensor]:
    """Result, gradients of h and f, and of alpha, p and radius, summed over rows."""
    scalars = settings(h, f, alpha, p, radius)
    out, _, stats = launch.retract(h, f, *scalars, None)
    return [out, *launch.retract_backward(g, None, h, f, stats, *scalars, None, True)[:5]]


def reference(dtype: torch.dtype, h: Tensor, f: Tensor, g: Tensor, step, p, radius) -> list[Tensor]:
    """The same by the reference formulas in `dtype`, unrounded, the gradients of the scalars row by row."""
    h, f, g = (t.to(dtype) for t in (h, f, g))
    out = retract_rows(h, f, step, p, radius)
    learned = not (isinstance(p, float) and math.isinf(p))
    grads = retract_vjp(g, h, f, step, p, radius, need_p=learned)
    per_row = [torch.zeros_like(grads.step) if t is None else t for t in (grads.step, grads.p, grads.radius)]
    return [out, grads.h, grads.f, *(t.flatten() for t in per_row)]


def check(launch: ModuleType, h: Tensor, f: Tensor, g: Tensor, alpha=0.7, p=1.0, radius=None) -> None:
    """At most twice the error of the float32 reference rounded once, plus two units in the last place of the row's
    largest entry, as often again as the angle has radians, and what the interpreter flushes to zero. A sum over rows
    may miss by that much for each of them."""
    found = ours(launch, h, f, g, alpha, p, radius)
    exact = reference(F64, h, f, g, alpha, p, radius)
    rounded = reference(compute_dtype(h, f), h, f, g, alpha, p, radius)
    assert found[0].dtype == found[1].dtype == h.dtype and found[2].dtype == f.dtype
    learned = 6 if radius is not None else 5  # a radius that is not given has no gradient to compare
    # The kernel also rounds c x, the reference only the difference f - c x: an error of beta, and so of theta.
    beta = rows(h.double(), f.double(), alpha).beta.squeeze(-1)
    turns = 1 + (beta if math.isinf(float(p)) else float(p) * torch.atan(beta / float(p)))
    for name, a, b, once in zip(NAMES[:learned], found, exact, rounded, strict=False):
        assert a.isfinite().all(), name
        info = torch.finfo(a.dtype)
        units = 2 * info.eps
        if name in ("out", "dh", "df"):
            assert a.shape == b.shape
            error, baseline = ((t.to(a.dtype).double() - b).abs().amax(-1) for t in (a, once))
            scale = b.abs().amax(-1)
            if name == "df":  # a difference of terms as large as alpha g, which may cancel in a narrow row
                scale = scale.maximum(float(alpha) * g.double().abs().amax(-1))
            bound = 2 * baseline + units * turns * scale + info.tiny
        else:  # a difference of products may cancel in one row
            assert a.shape == (1,)
            error = (a.double() - b.sum()).abs()
            baseline = (once.to(a.dtype).double() - b).abs().max()
            bound = b.numel() * (2 * baseline + units * turns.max() * b.abs().max() + info.tiny)
        assert (error <= bound).all(), (name, error, bound)


@pytest.mark.parametrize("d", [2, 3, 5, 64, 127, 128, 768, 1000, 1024, 4096, 16384])
def test_widths(launch: ModuleType, device: str, d: int) -> None:
    n = 2 if d > 1000 else 7
    check(launch, *tensors(n, d, device=device), p=1.5, radius=3.0 if d % 2 else None)


def test_width_one_has_no_tangent(launch: ModuleType, device: str) -> None:
    h, f, g = tensors(7, 1, device=device)
    out, dh, df, step, p, _ = ours(launch, h, f, g, 0.7, 1.0, None)
    assert torch.equal(out, h)
    torch.testing.assert_close(dh, g)
    for zero in (df, step, p):
        assert float(zero.abs().max()) < 1e-5


@pytest.mark.parametrize("n", [0, 1, 7, 33])
def test_rows(launch: ModuleType, device: str, n: int) -> None:
    h, f, g = tensors(n, 20, device=device)
    if n:
        return check(launch, h, f, g)
    out, dh, df, *sums = ours(launch, h, f, g, 0.7, 1.0, 3.0)
    assert out.shape == dh.shape == df.shape == (0, 20) and all(torch.equal(s, torch.zeros_like(s)) for s in sums)


@pytest.mark.parametrize("radius", [None, 3.0])
@pytest.mark.parametrize("p", [0.25, 0.5, 1.0, 2.0, 3.0, 40.0, math.inf])
def test_exponents(launch: ModuleType, device: str, p: float, radius: float | None) -> None:
    h, f, g = tensors(7, 32, device=device)
    f *= torch.logspace(-4, 3, 7, device=device)[:, None]
    check(launch, h, f, g, p=p, radius=radius)


DTYPES = [
    (BF16, BF16, BF16),
    (F16, F16, F16),
    (F32, BF16, F32),
    (BF16, F32, BF16),
    (F32, F16, BF16),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda ds: "-".join(str(d).removeprefix("torch.") for d in ds))
def test_dtypes(launch: ModuleType, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check(launch, *tensors(7, 48, device=device, dtypes=dtypes), p=2.0, radius=5.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_scalars_of_any_shape_and_dtype(
    launch: ModuleType, device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The same bits, and gradients of their own shapes and dtypes."""
    h, f, g = tensors(2, 3, 10, device=device)
    values = 0.75, 1.5, 3.0
    found = ours(launch, h, f, g, *(torch.full(shape, v, device=device, dtype=dtype) for v in values))
    expected = ours(launch, h, f, g, *values)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.to(b.dtype).flatten(), b.to(a.dtype).to(b.dtype).flatten())
    assert all(t.shape == shape and t.dtype == dtype for t in found[3:])


def test_lambda_is_a_factor_on_the_step(launch: ModuleType, device: str) -> None:
    h, f, g = tensors(5, 12, device=device)
    results = []
    for alpha, lambda_l in ((0.8, 3**-0.5), (0.8 * 3**-0.5, 1.0)):
        scalars = settings(h, f, alpha, 1.5, None, lambda_l)
        out, _, stats = launch.retract(h, f, *scalars, None)
        dh, df, of_alpha, of_p, *_ = launch.retract_backward(g, None, h, f, stats, *scalars, None, True)
        results.append([out, dh, df, of_alpha / lambda_l, of_p])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("log_p", [-5.0, -0.4, 0.6, 7.0])
def test_the_logarithm_of_an_exponent(launch: ModuleType, device: str, log_p: float) -> None:
    """Held in its range; its gradient is that of the exponent times it."""
    h, f, g = tensors(5, 12, device=device)
    alpha, rho, p = (torch.tensor([v], device=device) for v in (0.8, log_p, math.exp(min(max(log_p, -3.0), 5.0))))
    results = []
    for exponent, is_log in ((rho, True), (p, False)):
        scalars = alpha, exponent, None, 1.0, is_log, None
        out, _, stats = launch.retract(h, f, *scalars, None)
        *gradients, of_p = launch.retract_backward(g, None, h, f, stats, *scalars, None, True)[:4]
        results.append([out, *gradients, of_p if is_log else of_p * p])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("h_size", "f_size"), [(1e-30, 1e-30), (1e30, 1e30), (1e-30, 1e-33), (1e30, 1e33), (1e-20, 1e-6)]
)
def test_rows_of_any_size(launch: ModuleType, device: str, h_size: float, f_size: float) -> None:
    h, f, g = tensors(3, 24, device=device)
    check(launch, h_size * h, f_size * f, g, p=2.0)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_a_step_beyond_all_measure(launch: ModuleType, device: str, p: float) -> None:
    """The rotation is complete: onto the tangent (p = 1) or the antipode (p = 2)."""
    h, f, g = tensors(3, 24, device=device)
    out, dh, df, *sums = ours(launch, 1e-30 * h, 1e30 * f, g, 0.7, p, None)
    assert all(t.isfinite().all() for t in (dh, df, *sums))
    tangent = f - (f * h).sum(1, keepdim=True) / (h * h).sum(1, keepdim=True) * h
    end = -h if p == 2 else tangent * (h.norm(dim=1) / tangent.norm(dim=1))[:, None]
    torch.testing.assert_close(1e30 * out, end, rtol=1e-5, atol=1e-6)


def test_largest_and_smallest_bfloat16(launch: ModuleType, device: str) -> None:
    h, f, g = tensors(4, 24, device=device, dtypes=(BF16, BF16, BF16))
    sizes = torch.tensor([[1e-34], [1e-33], [1e37], [3e37]], device=device, dtype=BF16)
    check(launch, h * sizes, f * sizes, g)


@pytest.mark.parametrize("radius", [None, 3.0])
def test_rows_without_direction_or_update(launch: ModuleType, device: str, radius: float | None) -> None:
    h, f, g = tensors(5, 24, device=device)
    h[0] = 0
    f[1] = 0
    f[2] = 5 * h[2]
    h[3], f[3] = 0, 0
    out, dh, df, *sums = ours(launch, h, f, g, 0.7, 2.0, radius)
    assert all(t.isfinite().all() for t in (out, dh, df, *sums))
    assert not out[[0, 3]].any() and not df[[0, 3]].any()
    factor = torch.ones(5, 1, device=device) if radius is None else radius / h.norm(dim=1, keepdim=True)
    torch.testing.assert_close(out[1:3], (factor * h)[1:3])
    if radius is None:
        assert torch.equal(dh[[0, 3]], g[[0, 3]])
        tangent = g - (g * h).sum(1, keepdim=True) / (h * h).sum(1, keepdim=True) * h
        torch.testing.assert_close(df[1:3], 0.7 * tangent[1:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e8])
def test_norm_is_kept_where_the_update_is_parallel_and_large(launch: ModuleType, device: str, ratio: float) -> None:
    h, _, _ = tensors(16, 64, device=device)
    out = forward(launch, h, ratio * h, 1.0, 1.0)
    torch.testing.assert_close(out.norm(dim=-1), h.norm(dim=-1), rtol=3e-7, atol=0)


def test_nan_stays_in_its_row(launch: ModuleType, device: str) -> None:
    h, f, g = tensors(5, 16, device=device)
    f[1, 3], h[2, 5], h[3, 0] = math.nan, math.inf, math.nan
    found = ours(launch, h, f, g, 0.7, 1.0, None)
    for t in found[:3]:
        assert all(not t[i].isfinite().all() for i in (1, 2, 3)) and t[[0, 4]].isfinite().all()
    step = torch.tensor([math.nan], device=device)
    assert forward(launch, h, f, step, 1.0).isnan().all()


def test_strides_do_not_matter_and_inputs_are_never_written(launch: ModuleType, device: str) -> None:
    wide, column, narrow = tensors(6, 40, device=device)
    h, f, g = wide[:, 3:23], column.t()[:20].t(), narrow[:1, :20].expand(6, 20)  # rows apart, copied, one row repeated
    transposed = torch.randn(20, 6, device=device).t()
    before = [t.clone() for t in (wide, column, narrow)]
    versions = [t._version for t in (wide, column, narrow)]
    for a, b in ((h, f), (transposed, f), (h, transposed)):
        found = ours(launch, a, b, g, 0.7, 1.0, None)
        expected = ours(launch, *(t.contiguous() for t in (a, b, g)), 0.7, 1.0, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # other layouts may sum in another order
        assert all(t.is_contiguous() for t in found[:3])
    scalar_like = torch.ones((), device=device).expand(6, 20)  # the gradient of a sum
    check(launch, h.contiguous(), f.contiguous(), scalar_like)
    assert all(torch.equal(a, b) for a, b in zip((wide, column, narrow), before, strict=True))
    assert versions == [t._version for t in (wide, column, narrow)]


def test_nothing_is_written_beyond_the_last_row(
    launch: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are views into larger buffers whose rest keeps its value, for a number of rows that fills no program."""
    buffers: list[tuple[Tensor, int]] = []

    def guarded(self: Tensor, shape: Any, dtype: Any = None, device: Any = None) -> Tensor:
        size = math.prod(shape) if not isinstance(shape, int) else shape
        whole = torch.full((size + 4096,), 7.0, dtype=dtype or self.dtype, device=device or self.device)
        buffers.append((whole, size))
        return whole[:size].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    found = ours(launch, *tensors(5, 20, device=device), 0.7, 1.0, None)
    buffers = [(whole, size) for whole, size in buffers if size > 0]
    assert len(buffers) >= 5 and all((whole[size:] == 7).all() for whole, size in buffers)
    assert all(not (t == 7).any() for t in found)


def test_same_bits_on_every_call(launch: ModuleType, device: str) -> None:
    h, f, g = tensors(40, 33, device=device)
    first, second = (ours(launch, h, f, g, 0.7, 1.3, 2.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("dtype", "branch_dtype"), [(F32, BF16), (BF16, F32), (F32, F16)])
def test_two_outputs(launch: ModuleType, device: str, dtype: torch.dtype, branch_dtype: torch.dtype) -> None:
    h, f, g, g_branch = tensors(7, 40, device=device, dtypes=(dtype, dtype, dtype, branch_dtype))
    scalars = settings(h, f, 0.7, 2.0, None)
    out, none, stats = launch.retract(h, f, *scalars, None)
    again, branch, _ = launch.retract(h, f, *scalars, branch_dtype)
    assert none.shape == (0,) and branch.dtype == branch_dtype
    torch.testing.assert_close(out, again, rtol=torch.finfo(dtype).eps, atol=1e-6)
    exact = retract_rows(h.double(), f.double(), 0.7, 2.0)
    torch.testing.assert_close(branch.double(), exact, rtol=torch.finfo(branch_dtype).eps, atol=1e-6)
    found = launch.retract_backward(g, g_branch, h, f, stats, *scalars, None, True)
    expected = launch.retract_backward(g.float() + g_branch.float(), None, h, f, stats, *scalars, None, True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=max(torch.finfo(a.dtype).eps, 1e-5), atol=1e-5)


def test_a_gradient_of_p_that_nobody_wants_is_not_computed(launch: ModuleType, device: str) -> None:
    h, f, g = tensors(7, 40, device=device)
    scalars = settings(h, f, 0.7, 2.0, None)
    stats = launch.retract(h, f, *scalars, None)[2]
    full, without_p = (launch.retract_backward(g, None, h, f, stats, *scalars, None, need) for need in (True, False))
    assert full[3].all() and not without_p[3].any()
    torch.testing.assert_close(full[:3], without_p[:3], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_connections_in_a_row_do_not_drift(launch: ModuleType, device: str) -> None:
    count = IN_A_ROW
    h, *updates = tensors(count + 1, 64 if device == "cuda" else 4, 64, device=device)[0]
    start = h.norm(dim=-1)
    for f in updates:
        h = forward(launch, h, f, 0.3, 1.0)
    assert float((h.norm(dim=-1) / start - 1).abs().max()) < 1e-8 * count


@pytest.mark.slow
@pytest.mark.parametrize(("radius", "limit"), [(None, 1e-2), (27.7, 5e-4)])
def test_drift_of_a_bfloat16_stream(launch: ModuleType, device: str, radius: float | None, limit: float) -> None:
    """Rounding the stream makes its norm walk, unless a radius is given. Rounded here, to nearest, since the
    interpreter's own conversion truncates."""
    count = IN_A_ROW
    h, *updates = tensors(count + 1, 64 if device == "cuda" else 1, 768, device=device)[0].bfloat16()
    start = h.float().norm(dim=-1) if radius is None else radius
    for f in updates:
        h = forward(launch, h.float(), f, 0.3, 1.0, radius).bfloat16()
    assert float((h.float().norm(dim=-1) / start - 1).abs().max()) < limit


def test_small_angles_do_not_drift(launch: ModuleType, device: str) -> None:
    """Where the cosine rounds to 1, the norm must not grow: its mean change over rows is far below one rounding."""
    h, f, _ = tensors(512, 64, device=device)
    out = forward(launch, h, f, 2e-4, 1.0)
    change = out.double().norm(dim=-1) / h.double().norm(dim=-1) - 1
    assert abs(float(change.mean())) < 2e-9


# --- behind the node ---


def pair(h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(h, f, alpha, p, radius, branch_dtype=BF16)


def exact_pair(h: Tensor, f: Tensor, alpha: Tensor, p: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    out = retract_rows(h, f, alpha, p, radius)
    return out, out


def check_node(call: Any, device: str) -> None:
    """Two outputs and all gradients of ``call`` against float64, with Triton forced."""
    h, f, g, g_branch = tensors(2, 5, 24, device=device, dtypes=(F32, BF16, F32, BF16))
    inputs = [h, f, *(torch.tensor([v], device=device) for v in (0.7, 1.5, 3.0))]

    def gradients(function: Any, inputs: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out, branch = function(*leaves)
        assert torch.equal(out.to(branch.dtype), branch) or device == "cpu"  # the interpreter truncates
        return [out, *torch.autograd.grad((out, branch), leaves, (g.to(out.dtype), g_branch.to(branch.dtype)))]

    expected = gradients(exact_pair, [t.double() for t in inputs])
    with spheret.backend("triton"):
        assert spheret.which_backend(h, f, alpha=inputs[2], p=inputs[3], radius=inputs[4]).name == "triton"
        found = gradients(call, inputs)
    for a, b, like in zip(found, expected, (h, *inputs), strict=True):
        assert a.dtype == like.dtype and a.shape == like.shape
        tolerance = 1e-2 if a.dtype == BF16 else 1e-5
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("launch")
def test_the_node_over_the_kernels(device: str) -> None:
    check_node(pair, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the operators are Triton's on a GPU alone")
@pytest.mark.usefixtures("launch")
def test_one_compiled_graph(device: str) -> None:
    torch._dynamo.reset()
    check_node(torch.compile(pair, fullgraph=True), device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the operators are Triton's on a GPU alone")
@pytest.mark.usefixtures("launch")
def test_opcheck(device: str) -> None:
    h, f, g = tensors(3, 8, device=device)
    scalars = settings(h, f, 0.7, 1.3, 2.0)
    torch.library.opcheck(OPERATORS.retract, (h, f, *scalars, BF16))
    kept = OPERATORS.retract(h, f, *scalars, None)[2]
    torch.library.opcheck(OPERATORS.retract_backward, (g, None, h, f, kept, *scalars, None, True))
    torch.library.opcheck(OPERATORS.update_size, (h, f, scalars[0]))
