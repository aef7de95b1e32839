"""Device functions of the Triton kernels on their own, and the compilation of all kernels for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import mpmath
import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from spheret.kernels.triton_kernels import _grid, angle_exponent_slope, arctan, rotation  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _scalars(beta, p, arc, slope, versine, sinc, N: tl.constexpr):
    i = tl.arange(0, N)
    b, exponent = tl.load(beta + i), tl.load(p + i)
    tl.store(arc + i, arctan(b))
    tl.store(slope + i, angle_exponent_slope(b, exponent))
    v, s = rotation(b, exponent)
    tl.store(versine + i, v)
    tl.store(sinc + i, s)


def _offsets(out, n, d, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    row, column, _, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    tl.store(out + row[:, None] * BLOCK_D + column, row[:, None] * d + column, mask=mask)


@pytest.fixture
def scalars(launch: ModuleType, device: str):
    """(beta, p) -> arctan(beta), d theta/d p, 1 - cos theta, sin(theta)/beta; as many numbers as a power of two."""

    def call(beta: torch.Tensor, p: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.empty_like(beta) for _ in range(4)]
        triton.jit(_scalars)[(1,)](beta, p, *results, N=beta.numel())
        return results

    return call


def test_arctan(scalars, device: str) -> None:
    u = torch.cat([torch.logspace(-30, 30, 1024), torch.linspace(0.5, 2, 1023), torch.tensor([torch.inf])])
    u = u.to(device)
    found = scalars(u, torch.ones_like(u))[0]
    torch.testing.assert_close(found.double(), torch.atan(u.double()), rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("p", [0.25, 1.0, 1.7, 2.0, 3.0, 6.0, 100.0])
def test_rotation_and_exponent_slope(scalars, device: str, p: float) -> None:
    """Against 60 digits. Relative errors: the versine, the exponent slope, and at even p the sinc, keep theirs at every
    angle; elsewhere the sine is known to a rounding of one."""
    tolerance = 1e-6
    beta = torch.logspace(-12, 6, 64, dtype=torch.float64).to(device, torch.float32)
    _, slope, versine, sinc = scalars(beta, torch.full_like(beta, p))
    with mpmath.workdps(60):
        for i, b in enumerate(beta.tolist()):
            u = mpmath.mpf(b) / p
            theta = p * mpmath.atan(u)
            # a rounding of u turns theta by as much as p eps, for large p many roundings of theta/pi
            turn = tolerance * max(1.0, float(theta))
            exact = mpmath.atan(u) - u / (1 + u * u)
            assert abs(slope[i].item() - exact) < tolerance * exact + torch.finfo(torch.float32).tiny
            exact = 2 * mpmath.sin(theta / 2) ** 2
            assert abs(versine[i].item() - exact) < turn * (float(exact) if theta < 1 else 1)
            exact = mpmath.sin(theta)
            small = float(abs(exact)) if theta < 1 or (p in (2.0, 6.0) and u > 10) else 1.0
            assert abs(sinc[i].item() * b - exact) < turn * small


def test_infinite_exponent(scalars, device: str) -> None:
    beta = torch.logspace(-6, 1, 32, device=device)
    _, slope, versine, sinc = scalars(beta, torch.full_like(beta, torch.inf))
    assert not slope.any()
    exact = beta.double()
    torch.testing.assert_close(versine.double(), 2 * torch.sin(exact / 2) ** 2, rtol=5e-7, atol=5e-7)
    torch.testing.assert_close(sinc.double(), torch.sin(exact) / exact, rtol=5e-7, atol=5e-8)


def test_offsets_pass_two_to_the_31(launch: ModuleType, device: str) -> None:
    """The address of row 7 of a tensor whose rows are 2^30 numbers apart."""
    out = torch.empty(8, 4, dtype=torch.int64, device=device)
    triton.jit(_offsets)[(2,)](out, 8, 2**30, BLOCK_N=4, BLOCK_D=4)
    assert torch.equal(out.cpu(), torch.arange(8)[:, None] * 2**30 + torch.arange(4))


COMPILE = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spheret.kernels import triton_kernels
from spheret.kernels.triton_launch import program_size

BLOCK_N, BLOCK_D, WARPS = program_size(1024)
CONSTANT = {"LOG_P": True, "NEED_P": True, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D, "DTYPE": tl.float32}
TYPES = dict.fromkeys(("h_ptr", "f_ptr", "g_ptr", "out_ptr", "dh_ptr", "df_ptr"), "*bf16")
TYPES |= dict.fromkeys(("alpha_ptr", "p_ptr", "radius_ptr", "stats_ptr", "sums_ptr"), "*fp32")
TYPES |= dict.fromkeys(("branch_ptr", "g_branch_ptr", "theta_ptr", "slope_ptr"), "*fp32") | {"beta_ptr": "*fp64"}
TYPES |= {"lambda_l": "fp32"}

def compiled(name, **fixed):
    kernel = getattr(triton_kernels, name + "_kernel")
    names = kernel.arg_names
    fixed = {k: v for k, v in (CONSTANT | fixed).items() if k in names}
    types = {k: "constexpr" if k in fixed else TYPES.get(k, "i32") for k in names}
    multiples = [i for i, k in enumerate(names) if types[k] not in ("constexpr", "fp32")]
    source = ASTSource(kernel, types, constexprs=fixed, attrs={(i,): [["tt.divisibility", 16]] for i in multiples})
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

def loads(ptx):
    return len(re.findall(r"ld\\.global[.\\w:]*\\.v4\\.b32", ptx))

forward = compiled("retract", branch_ptr=None, theta_ptr=None)
backward = compiled("retract_backward", g_branch_ptr=None, slope_ptr=None)
others = compiled("retract"), compiled("retract_backward"), compiled("update_size")
for ptx in (forward, backward, *others):
    assert not re.search(r"(div|sqrt|rsqrt|sin|cos)[.\\w]*(approx|full)", ptx)
per_tensor = 1024 // 8 // 32 // WARPS
assert (loads(forward), loads(backward)) == (2 * per_tensor, 3 * per_tensor)
assert "atom." not in backward and "red." not in backward
print("compiled")
"""


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In bfloat16 at d = 1024 every tensor is read once, 16 bytes at a time; no approximate division, root or sine, and
    no atomic addition."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_CACHE_DIR": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0 and "compiled" in out.stdout, out.stderr
