"""The Triton kernels behind the operators: eager autograd and one compiled graph, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

CODE = """
import torch, spheret
from spheret.geometry import retract_rows
from spheret.kernels import retract_for_two

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
make = lambda *shape: torch.randn(*shape, generator=generator).to(device)
h, g, f = make(2, 5, 24), make(2, 5, 24), make(2, 5, 24).bfloat16()
g2 = make(2, 5, 24).bfloat16()
step, p, radius = (torch.tensor([v], device=device) for v in (0.7, 1.5, 3.0))
assert spheret.which_backend(h, f, alpha=step, p=p).name == "triton"

def learned(h, f, step, p, radius):
    return retract_for_two(h, f, alpha=step, p=p, radius=radius, read_dtype=torch.bfloat16)

def fixed(h, f):
    return retract_for_two(h, f, alpha=0.7, p=1.5, read_dtype=torch.bfloat16)

def gradients(function, inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out, read = function(*leaves)
    assert torch.equal(out.to(read.dtype), read) or device == "cpu"  # the interpreter truncates
    return [out, *torch.autograd.grad((out, read), leaves, (g.to(out.dtype), g2.to(read.dtype)))]

def exact(h, f, step=0.7, p=1.5, radius=None):
    out = retract_rows(h, f, step, p, radius)
    return out, out

for function, inputs in ((learned, (h, f, step, p, radius)), (fixed, (h, f))):
    expected = gradients(exact, [t.double() for t in inputs])
    for call in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend=BACKEND)):
        for a, b, like in zip(gradients(call(function), inputs), expected, (h, *inputs), strict=True):
            assert a.dtype == like.dtype and a.shape == like.shape
            tolerance = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
print("agreed")
"""


def test_operators() -> None:
    """In a process of their own: they serve the CPU's tensors there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    if not torch.cuda.is_available():
        environment |= {"TRITON_INTERPRET": "1", "SPHERET_BACKEND": "triton"}
    code = CODE.replace("BACKEND", repr(backend))
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert out.returncode == 0 and "agreed" in out.stdout, out.stderr
