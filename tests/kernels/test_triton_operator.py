"""The Triton kernels behind the operators: eager autograd and one compiled graph, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

CODE = """
import math, torch
from spheret.geometry import retract_rows
from spheret.kernels import operator, triton_operator

device = "cuda" if torch.cuda.is_available() else "cpu"
triton_operator.register(device)
assert triton_operator.unavailable() == ""
generator = torch.Generator().manual_seed(0)
make = lambda *shape: torch.randn(*shape, generator=generator).to(device)
h, g, f = make(2, 5, 24), make(2, 5, 24), make(2, 5, 24).bfloat16()
step, p, radius = (torch.tensor([v], device=device) for v in (0.7, 1.5, 3.0))

def retract(h, f, step, p, radius):
    return operator.retract_rows(h, f, step, 1.0, p, 1.0, radius, math.nan)[0]

def fixed(h, f):
    return operator.retract_rows(h, f, None, 0.7, None, 1.5, None, math.nan)[0]

def gradients(function, inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, g.to(out.dtype))]

doubles = [t.double() for t in (h, f, step, p, radius)]
exact = gradients(lambda h, f, s, p, r: retract_rows(h, f, s, p, r), doubles)
exact_fixed = gradients(lambda h, f: retract_rows(h, f, 0.7, 1.5), doubles[:2])
backend = "inductor" if device == "cuda" else "aot_eager"
for call in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend=backend)):
    for function, inputs, expected in ((retract, (h, f, step, p, radius), exact), (fixed, (h, f), exact_fixed)):
        for a, b, like in zip(gradients(call(function), inputs), expected, (h, *inputs)):
            assert a.dtype == like.dtype and a.shape == like.shape
            tolerance = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)

out, stats = triton_operator.forward(h, f, None, 0.7, None, 1.5, None, math.nan)
like = triton_operator.fake_forward(h, f)
gradient = triton_operator.backward(g, h, f, stats, None, 0.7, p, 1.0, None, math.nan)
for a, b in zip((out, stats, *gradient), (*like, *triton_operator.fake_backward(g, h, f))):
    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
print("agreed")
"""


def test_operators() -> None:
    """In a process of their own: they replace the CPU loops there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    out = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=240)
    assert out.returncode == 0 and "agreed" in out.stdout, out.stderr
