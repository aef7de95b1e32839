"""Acceptance test of the GPU kernels: speed, agreement with float64, CUDA graphs, compilation, a whole GPT step.

    python benchmarks/gpu.py [--out runs/gpu.json] [--only speed graph ...] [--seconds 450]
    python benchmarks/gpu.py --dry-run     # small sizes in Triton's interpreter: tests the script, not the speed

Writes one JSON file: device, versions, and for every part its figures and whether it passed, or why it failed or was
skipped. A part that fails does not stop the others. A part for which no time is left is skipped. Without a GPU the exit
code is 2.

The letters in the docstrings name the goals: (a) bandwidth of the forward and (b) of the backward, (c) the same time
for every p, (d) agreement with float64, (e) CUDA graphs, compilation and large tensors, (f) a whole optimizer step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
# Goals: shares of a copy's bandwidth, speed-up over autograd on the reference formulas, spread of the time over p.
FORWARD_SHARE, BACKWARD_SHARE, SPEEDUP, SPREAD = 0.90, 0.85, 8.0, 0.05
EXPONENTS = (0.25, 0.5, 1.0, 2.0, 3.0, 1.7, float("inf"))
Figures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Device and sizes; ``launch`` is the module that launches the kernels."""

    device: str
    dry: bool
    launch: Any
    deadline: float

    @property
    def rows(self) -> int:
        return 16 if self.dry else 65_536

    @property
    def widths(self) -> tuple[int, ...]:
        return (64,) if self.dry else (1024, 4096)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def tensors(self, count: int, rows: int, d: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(rows, d, device=self.device, dtype=dtype) for _ in range(count)]

    def scalar(self, value: float) -> Tensor:
        return torch.tensor([value], device=self.device)

    def scalars(self, alpha: float, p: float, radius: float | None = None) -> tuple[Any, ...]:
        """From alpha to theta, in the order of the operators."""
        return self.scalar(alpha), self.scalar(p), None if radius is None else self.scalar(radius), 1.0, False, None

    def seconds(self, call: Callable[[], object], *, graph: bool = True) -> float:
        """Median seconds of one call. A sample is ten calls, recorded as one CUDA graph unless ``graph`` is false."""
        if self.device == "cpu":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        # In a graph, the kernels follow each other without a gap: no time of Python or of launching is measured.
        calls = 10
        run = _captured(call, calls) if graph else lambda: [call() for _ in range(calls)]
        run()
        samples = []
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3 / calls)
        return statistics.median(samples)


def _captured(call: Callable[[], object], calls: int) -> Callable[[], object]:
    # First calls compile and allocate, which a capture does not allow, so they run before it, on a stream of their own.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


# --- speed ---


def copy_bandwidth(bench: Bench) -> float:
    """Bytes per second that a device-to-device copy reads and writes."""
    source = torch.empty((1 << 16) if bench.dry else (1 << 30), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / bench.seconds(lambda: target.copy_(source))


@dataclass(frozen=True)
class Connection:
    """One connection at a width, its two calls, and the bytes that they move."""

    bench: Bench
    d: int
    p: float = 1.0
    learns_p: bool = False

    def calls(self) -> tuple[Callable[[], object], Callable[[], object]]:
        launch, scalars = self.bench.launch, self.bench.scalars(0.7, self.p)
        h, f, g = self.bench.tensors(3, self.bench.rows, self.d)
        stats = launch.retract(h, f, *scalars, None)[2]

        def forward() -> object:
            return launch.retract(h, f, *scalars, None)

        def backward() -> object:
            return launch.retract_backward(g, None, h, f, stats, *scalars, None, self.learns_p)

        return forward, backward

    def bytes(self) -> tuple[int, int]:
        row = 2 * self.d
        return self.bench.rows * (3 * row + 32), self.bench.rows * (5 * row + 32 + 16)

    def seconds(self) -> tuple[float, float]:
        forward, backward = self.calls()
        return self.bench.seconds(forward), self.bench.seconds(backward)


@contextmanager
def program_size(bench: Bench, rows: int, warps: int) -> Iterator[None]:
    """Use another number of rows and warps per program."""
    usual = bench.launch.program_size
    bench.launch.program_size = lambda d: (rows, usual(d)[1], warps)
    try:
        yield
    finally:
        bench.launch.program_size = usual


def speed(bench: Bench) -> Figures:
    """(a), (b) Share of the copy's bandwidth, and the speed-up over autograd on the reference formulas."""
    bandwidth = copy_bandwidth(bench)
    figures: Figures = {"copy_bytes_per_s": bandwidth}
    passed = True
    for d in bench.widths:
        connection = Connection(bench, d)
        times, sizes = connection.seconds(), connection.bytes()
        shares = [size / taken / bandwidth for size, taken in zip(sizes, times, strict=True)]
        eager = bench.seconds(_eager(bench, d), graph=False)
        figures[str(d)] = {
            "forward_s": times[0],
            "backward_s": times[1],
            "forward_bytes": sizes[0],
            "backward_bytes": sizes[1],
            "forward_share": shares[0],
            "backward_share": shares[1],
            "eager_s": eager,
            "speedup": eager / sum(times),
        }
        passed &= shares[0] >= FORWARD_SHARE and shares[1] >= BACKWARD_SHARE and eager / sum(times) >= SPEEDUP
    return figures | {"passed": passed}


def _eager(bench: Bench, d: int) -> Callable[[], object]:
    from spheret.geometry import retract_rows

    h, f, g = bench.tensors(3, bench.rows, d)
    h, f, step = h.requires_grad_(), f.requires_grad_(), bench.scalar(0.7).requires_grad_()

    def call() -> object:
        out = retract_rows(h.float(), f.float(), step, 1.0).to(h.dtype)
        return torch.autograd.grad(out, (h, f, step), g)

    return call


def tune(bench: Bench) -> Figures:
    """Times for every number of warps and rows per program, from which to set the kernels' own choice; never fails."""
    figures: Figures = {}
    for d in bench.widths:
        connection = Connection(bench, d)
        rows, _, warps = bench.launch.program_size(d)
        sizes = [(r, w) for r in (1, 2) for w in (1, 2, 4, 8, 16) if 8 <= r * d // (32 * w) <= 64]  # numbers a thread
        if bench.dry:
            sizes = [(rows, warps)]
        table = {}
        for size in sizes:
            with program_size(bench, *size):
                table["{} rows, {} warps".format(*size)] = connection.seconds()
        figures[str(d)] = {"usual": f"{rows} rows, {warps} warps", "forward_s, backward_s": table}
        for i, direction in enumerate(("forward", "backward")):
            figures[str(d)][f"best_{direction}"] = min(table, key=lambda size: table[size][i])
    return figures | {"passed": True}


def exponents(bench: Bench) -> Figures:
    """(c) Every fixed p takes the same time. A learned p is timed too, but not judged."""
    figures: Figures = {}
    for p in EXPONENTS:
        figures[f"p={p:g}"] = Connection(bench, bench.widths[0], p).seconds()
    spread = [max(t) / min(t) - 1 for t in zip(*figures.values(), strict=True)]
    figures["p learned"] = Connection(bench, bench.widths[0], learns_p=True).seconds()
    return figures | {"forward_spread": spread[0], "backward_spread": spread[1], "passed": max(spread) <= SPREAD}


def liger(bench: Bench) -> Figures:
    """Liger's fused addition and RMS norm, forward and backward, beside one connection."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {"skipped": "liger-kernel is not installed"}
    from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm

    figures: Figures = {}
    for d in bench.widths:
        norm = LigerFusedAddRMSNorm(d).to(bench.device, torch.bfloat16)
        f, h, g1, g2 = bench.tensors(4, bench.rows, d)
        f, h = f.requires_grad_(), h.requires_grad_()

        def call(f: Tensor = f, h: Tensor = h, g: tuple[Tensor, Tensor] = (g1, g2), norm: Any = norm) -> object:
            return torch.autograd.grad(norm(f, h), (f, h, norm.weight), g)

        theirs, ours = bench.seconds(call, graph=False), sum(Connection(bench, d).seconds())
        figures[str(d)] = {"liger_s": theirs, "ours_s": ours, "ratio": ours / theirs}
    return figures | {"passed": True}


# --- correctness ---


def tests(bench: Bench) -> Figures:
    """(d) The kernels' own tests, on the GPU against float64."""
    chosen = ["tests/kernels/test_triton.py", "tests/kernels/test_triton_kernels.py", "tests/kernels/test_autograd.py"]
    if bench.dry:
        chosen = ["tests/kernels/test_triton.py::test_widths"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    command += [] if bench.dry else ["-n", "8"]  # compiling is most of the work
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=bench.left())
    return {"passed": done.returncode == 0, "output": done.stdout[-4000:] + done.stderr[-2000:]}


def matrix(bench: Bench) -> Figures:
    """(d) Errors over widths, dtypes, exponents and radii, in units in the last place of the row's largest number."""
    from spheret.geometry import retract_rows, retract_vjp

    worst: Figures = {}
    for d, dtype, radius in _cases(bench):
        for p in (0.5, 1.0, 2.0, float("inf")):
            h, f, g = bench.tensors(3, 5 if bench.dry else 257, d, dtype)
            scalars = bench.scalars(0.3, p, radius)
            out, _, stats = bench.launch.retract(h, f, *scalars, None)
            dh, df, *_ = bench.launch.retract_backward(g, None, h, f, stats, *scalars, None, False)
            wide = [t.double() for t in (g, h, f)]
            grads = retract_vjp(*wide, 0.3, p, radius, need_p=False)
            exact = retract_rows(*wide[1:], 0.3, p, radius), grads.h, grads.f
            for name, a, b in zip(("out", "dh", "df"), (out, dh, df), exact, strict=True):
                size = b.abs().amax(-1, keepdim=True).clamp_min(0.3 if d == 1 else 1e-3)
                error = float(((a.double() - b).abs() / size).max()) / torch.finfo(dtype).eps
                key = f"{name} {str(dtype).removeprefix('torch.')}"
                worst[key] = max(worst.get(key, 0.0), error)
    return worst | {"passed": all(error < (1.0 if "16" in key else 16.0) for key, error in worst.items())}


def _cases(bench: Bench) -> Iterator[tuple[int, torch.dtype, float | None]]:
    """Every dtype at one width, and every width in bfloat16. All pairs would be too many kernels to compile."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for radius in (None, 3.0):
            yield (64 if bench.dry else 1024), dtype, radius
    for d in (3,) if bench.dry else (1, 3, 64, 127, 768, 1000, 4096, 16384):
        yield d, torch.bfloat16, 3.0


def graph(bench: Bench) -> Figures:
    """(e) A CUDA graph of both directions, replayed on new numbers, gives the bits of eager calls."""
    launch = bench.launch
    h, f, g = bench.tensors(3, 1000, 768)
    scalars = bench.scalars(0.7, 1.5, 3.0)
    results: list[Tensor] = []

    def call() -> None:
        out, branch, stats = launch.retract(h, f, *scalars, torch.float32)
        results[:] = [out, branch, *launch.retract_backward(g, branch, h, f, stats, *scalars, None, True)]

    replay = _captured(call, 1)
    recorded = list(results)
    for t, new in zip((h, f, g), bench.tensors(6, 1000, 768)[3:], strict=True):
        t.copy_(new)
    for scalar, new in zip(scalars[:3], (0.3, 2.5, 20.0), strict=True):
        scalar.fill_(new)
    replay()
    replayed = [t.clone() for t in recorded]
    call()
    return {"passed": all(torch.equal(a, b) for a, b in zip(replayed, results, strict=True))}


def compiled(bench: Bench) -> Figures:
    """(e) The operators in one compiled graph, forward and backward, against eager calls."""
    import spheret

    h, f, g = bench.tensors(3, *((4, 64) if bench.dry else (1000, 768)))
    inputs = [t.requires_grad_() for t in (h, f, bench.scalar(0.7), bench.scalar(1.5))]

    def block(h: Tensor, f: Tensor, step: Tensor, p: Tensor) -> Tensor:
        return spheret.retract(2 * h, f.sin(), alpha=step, p=p) * 0.5

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, g)]

    pairs = list(zip(gradients(torch.compile(block, fullgraph=True)), gradients(block), strict=True))
    errors = [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs]
    return {"relative_errors": errors, "passed": max(errors) < 2e-2}


def large(bench: Bench) -> Figures:
    """(e) More than 2^31 elements in one call: the last rows are right."""
    from spheret.geometry import retract_rows, retract_vjp

    d = 4096
    rows = 2**31 // d + 100
    h, f, g = (torch.empty(rows, d, dtype=torch.bfloat16, device=bench.device).normal_() for _ in range(3))
    scalars = bench.scalars(0.7, 1.0)
    out, _, stats = bench.launch.retract(h, f, *scalars, None)
    dh, df, *_ = bench.launch.retract_backward(g, None, h, f, stats, *scalars, None, False)
    last = [t[-200:].double() for t in (g, h, f)]
    grads = retract_vjp(*last, 0.7, 1.0, None, need_p=False)
    exact = retract_rows(*last[1:], 0.7, 1.0), grads.h, grads.f
    errors = [float((a[-200:].double() - b).abs().max()) for a, b in zip((out, dh, df), exact, strict=True)]
    return {"elements": rows * d, "errors": errors, "passed": max(errors) < 3e-2}


# --- a whole model ---


def step(bench: Bench) -> Figures:
    """(f) Compiled optimisation steps of a 24-layer GPT at d = 1024: proj against pre-ln, taking turns.

    They run in a process of their own, so that it can be stopped when its time is up.
    """
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['step_in_process'](dry={bench.dry})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=bench.left())
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def step_in_process(*, dry: bool) -> None:
    """Print what :func:`step` records."""
    from spheret import GPT, which_backend
    from spheret.benchmarking.step import LEARNING_RATE, StepBench, Variant, batch
    from spheret.training.device import autocast
    from spheret.training.optimizer import build_adamw

    device = torch.device("cpu" if dry else "cuda")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 64, "batch_size": 2}
    if not dry:
        torch.set_float32_matmul_precision("high")
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        size = 1 << int(gib / 2.6).bit_length() - 1  # a power of two; a sequence takes less than 2.6 GiB
        shape = {
            "n_layer": 24,
            "n_head": 16,
            "n_embd": 1024,
            "block_size": 1024,
            "vocab_size": 50_304,
            "batch_size": min(32, size),
        }
    config = StepBench(schemes=("pre-ln", "proj"), rounds=2 if dry else 15, **shape)
    variants = []
    for name in config.schemes:
        torch.manual_seed(0)
        model = GPT(config.model(name)).to(device).train()
        forward = model if dry else torch.compile(model, fullgraph=True)
        variants.append(Variant(name, model, build_adamw(model, lr=LEARNING_RATE), forward, model.after_step))
    precision = autocast(device, torch.bfloat16)
    for number in range(-config.warmup, config.rounds):
        x, y = batch(config, number, device)
        for variant in variants:
            taken = variant.timed_step(x, y, precision, device)
            if number >= 0:
                variant.seconds.append(taken)
    base, ours = (statistics.median(v.seconds) for v in variants)
    h = torch.zeros(1, 8, device=device)
    record = {"batch_size": config.batch_size, "pre_ln_s": base, "proj_s": ours, "ratio": ours / base}
    record |= {
        "tokens_per_s": config.batch_size * config.block_size / ours,
        "peak_bytes": [v.peak_bytes for v in variants],
    }
    print(json.dumps(record | {"backend": which_backend(h, h.bfloat16())._asdict(), "passed": ours <= 1.05 * base}))


# --- running ---

# Name -> part, and the seconds that must be left for it to start. The important parts come first.
PARTS: dict[str, tuple[Callable[[Bench], Figures], int]] = {
    "speed": (speed, 30),
    "exponents": (exponents, 20),
    "graph": (graph, 10),
    "matrix": (matrix, 40),
    "large": (large, 15),
    "compiled": (compiled, 30),
    "tests": (tests, 60),
    "liger": (liger, 15),
    "step": (step, 120),
    "tune": (tune, 50),
}
NEEDS_GPU, TIMED = ("graph", "large"), ("speed", "exponents", "step")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if p)])}


def run_part(bench: Bench, name: str) -> Figures:
    part, needed = PARTS[name]
    if bench.dry and name in NEEDS_GPU:
        return {"skipped": "needs a GPU"}
    if bench.left() < needed:
        return {"skipped": f"needs about {needed} s, {bench.left():.0f} s are left"}
    started = time.monotonic()
    try:
        figures = part(bench)
    except Exception as error:  # the other parts still run
        figures = {"passed": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    if bench.dry and name in TIMED:
        figures.pop("passed", None)  # times in the interpreter mean nothing
    if bench.device == "cuda":
        torch.cuda.empty_cache()
    return figures | {"seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.json"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=450, help="for all parts together")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, in Triton's interpreter without a GPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.dry_run:
        print("no CUDA device: this benchmark needs a GPU; --dry-run checks the script itself", file=sys.stderr)
        return 2
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    from spheret.kernels import triton_launch
    from spheret.training.device import machine, versions

    bench = Bench(device, options.dry_run, triton_launch, time.monotonic() + options.seconds)
    record: Figures = {"dry_run": bench.dry, "machine": machine(torch.device(device))}
    record["versions"] = versions() | {"triton": triton.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        record[name] = run_part(bench, name)
        options.out.write_text(json.dumps(record, indent=1))
        state = {True: "passed", False: "FAILED", None: "not judged"}[record[name].get("passed")]
        print(f"{name}: {state} {json.dumps(record[name])[:600]}", flush=True)
    return 0 if all(record[name].get("passed", True) or bench.dry for name in options.only) else 1


if __name__ == "__main__":
    raise SystemExit(main())
