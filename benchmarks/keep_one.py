"""What it would save and cost to keep only h for the backward, not f: benchmarks/results/keep_one.json and .md.

A connection keeps h, f and one number of each row for its backward pass. The neighbouring sublayers keep h and h'
anyway, so f could be recovered: f = c h + (h' - C h)/(S step). This costs more passes over the rows (this script
repeats the forward pass, which a kernel would not need), and the rounding of h' causes an error of about eps/sin(theta)
in the quotient. Rows that turn by less than a threshold keep their f.

    python benchmarks/keep_one.py    # about two minutes on two quiet cores
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spheret
from spheret.benchmarking.measuring import keep_freed_memory, peak_cpu_bytes
from spheret.connections.spheret import SpheretNorm
from spheret.geometry import cos_and_sinc
from spheret.training.device import machine, versions
from spheret.training.run_folder import write_json, write_text

RESULTS = Path(__file__).parent / "results"
SMALLEST_ANGLE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # radians; below, a row keeps its f


class Solved(torch.autograd.Function):
    """``retract(h, f, alpha=step)`` with p = 1 that keeps h, h', and only the rows of f that hardly turn h.

    Its backward pass recovers f and repeats the forward pass with it, so it needs no kernel of its own.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, f: Tensor, step: Tensor) -> Tensor:
        out = spheret.retract(h, f, alpha=step)
        x, y = h.float(), f.float()
        c = (x * y).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)
        beta = step * (y - c * x).norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)
        cos, sinc = cos_and_sinc(beta, 1.0)
        slow = (sinc * beta < SMALLEST_ANGLE[h.dtype]).squeeze(-1)
        ctx.save_for_backward(h, out, c, cos, sinc, step, slow, f[slow])
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, out, c, cos, sinc, step, slow, f_slow = ctx.saved_tensors
        factor = 1 / (step * sinc)
        f = (c - cos * factor) * h + factor * out
        f[slow] = f_slow.to(f.dtype)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (h, f, step)]
            dh, df, dstep = torch.autograd.grad(spheret.retract(*inputs[:2], alpha=inputs[2]), inputs, g)
        return dh, df.to(f_slow.dtype), dstep


def errors(dtype: torch.dtype, size: float) -> dict[str, float]:
    """Largest relative error of a row's df, with f kept and with f recovered; h in ``dtype``, beta about ``size``."""
    torch.manual_seed(0)
    h, f, g = (torch.randn(2048, 768) for _ in range(3))
    h, f = h.to(dtype), size * f
    step = torch.ones(1)
    exact = gradient(spheret.retract, h.double(), f.double(), g.double(), step.double())
    found = {
        "kept": gradient(spheret.retract, h, f, g, step),
        "solved": gradient(lambda h, f, alpha: Solved.apply(h, f, alpha), h, f, g, step),
    }
    scale = exact.norm(dim=-1)
    return {name: float(((df.double() - exact).norm(dim=-1) / scale).max()) for name, df in found.items()}


def gradient(function: Callable[..., Tensor], h: Tensor, f: Tensor, g: Tensor, step: Tensor) -> Tensor:
    h, f = h.clone().requires_grad_(), f.clone().requires_grad_()
    return torch.autograd.grad(function(h, f, alpha=step), f, g.to(h.dtype))[0]


def model_step(solved: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    shape = {"n_layer": 12, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 257}
    model = spheret.GPT(spheret.GPTConfig(scheme="proj", **shape))
    if solved:
        for module in model.modules():
            if isinstance(module, SpheretNorm):
                module.forward = _solved_forward(module)  # type: ignore[method-assign]
    tokens = torch.randint(257, (4, 257))

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        model.zero_grad(set_to_none=True)

    return step


def _solved_forward(module: SpheretNorm) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(h: Tensor, f: Tensor, split: bool) -> tuple[Tensor, Tensor]:
        out = Solved.apply(h, f, module.step())
        return out, out

    return forward


def steps() -> dict[str, Any]:
    """Peak memory and seconds of a 12 x 384 step, with f kept and with f recovered, taking turns."""
    keep_freed_memory()
    calls = {"kept": model_step(False), "solved": model_step(True)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {
        name: {"peak_bytes": peak_cpu_bytes(call), "median_s": statistics.median(seconds[name][1:])}
        for name, call in calls.items()
    }


def main() -> None:
    print("gradient errors ...", flush=True)
    table = {
        str(dtype).removeprefix("torch."): {size: errors(dtype, size) for size in (1e-4, 1e-2, 0.1, 0.3, 1.0, 10.0)}
        for dtype in SMALLEST_ANGLE
    }
    print("steps of a 12 x 384 model ...", flush=True)
    record = {"versions": versions(), "machine": machine(torch.device("cpu")), "errors": table, "step": steps()}
    write_json(RESULTS / "keep_one.json", record)
    lines = ["| stream | beta | error of df, f kept | f solved back |", "| --- | ---: | ---: | ---: |"]
    for dtype, sizes in table.items():
        lines += [f"| {dtype} | {size:g} | {e['kept']:.1e} | {e['solved']:.1e} |" for size, e in sizes.items()]
    lines += ["", "| 12 x 384, 1,024 tokens, eager | peak | step |", "| --- | ---: | ---: |"]
    lines += [
        f"| f {name} | {s['peak_bytes'] / 2**20:.1f} MiB | {1e3 * s['median_s']:.0f} ms |"
        for name, s in record["step"].items()
    ]
    write_text(RESULTS / "keep_one.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
