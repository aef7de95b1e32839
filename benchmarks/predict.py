"""Step times, measured and predicted from bytes and operations: benchmarks/results/predict.json, predict.md.

A step consists of matrix products and everything else. Products are predicted from their operations, at the speed of
this model's own MLP; attention counts as products. Everything else is predicted from its bytes, at the speed of a copy.
Both speeds are measured in the same process, and the variants take turns.

    python benchmarks/predict.py    # about three minutes on two quiet cores
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from spheret.benchmarking.measuring import copy_function, keep_freed_memory, moved_bytes
from spheret.benchmarking.step import StepBench, batch, build_variants
from spheret.connections import list_schemes
from spheret.training.device import machine, versions
from spheret.training.run_folder import write_json, write_text

RESULTS = Path(__file__).parent / "results"
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product")  # operators whose bytes do not count as "everything else"
ROUNDS = 15


def seconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    taken = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def speeds(config: StepBench) -> tuple[float, float]:
    """Operations per second of the MLP's products at this shape, and bytes per second of a copy of the stream."""
    tokens, d = config.batch_size * config.block_size, config.n_embd
    x, w, v = torch.randn(tokens, d), torch.randn(4 * d, d), torch.randn(d, 4 * d)
    products = seconds(lambda: (x @ w.T) @ v.T, 100)
    # Two products of 2 * tokens * d * 4d operations each; a copy reads and writes 4 bytes per number.
    return 16 * tokens * d * d / products, 8 * tokens * d / seconds(copy_function(x), 100)


def main() -> None:
    keep_freed_memory()
    config = StepBench(schemes=tuple(list_schemes()))
    device = torch.device("cpu")
    x, y = batch(config, 0, device)
    variants = build_variants(config, device)
    taken: dict[str, list[float]] = {v.name: [] for v in variants}
    gc.disable()
    for number in range(-2, ROUNDS):
        gc.collect()
        for v in variants:
            started = time.perf_counter()
            v.step(x, y, nullcontext())
            if number >= 0:
                taken[v.name].append(time.perf_counter() - started)
    flop_rate, byte_rate = speeds(config)
    rows = []
    for v in variants:
        with FlopCounterMode(display=False) as flops:
            v.step(x, y, nullcontext())
        other = moved_bytes(partial(v.step, x, y, nullcontext()), but=PRODUCTS)
        predicted = flops.get_total_flops() / flop_rate + other / byte_rate
        measured = statistics.median(taken[v.name])
        rows.append({"variant": v.name, "flops": flops.get_total_flops(), "bytes": other})
        rows[-1] |= {"predicted_s": predicted, "measured_s": measured}
    base = next(r for r in rows if r["variant"] == "pre-ln")
    lines = ["| variant | GFLOP | other MB | predicted | measured | predicted ratio | measured ratio | gap |"]
    lines.append("| --- " + "| ---: " * 7 + "|")
    for r in rows:
        p, m = r["predicted_s"] / base["predicted_s"], r["measured_s"] / base["measured_s"]
        r |= {"predicted_ratio": p, "measured_ratio": m}
        lines.append(
            f"| {r['variant']} | {r['flops'] / 1e9:.2f} | {r['bytes'] / 1e6:.0f} | {1e3 * r['predicted_s']:.0f} ms "
            f"| {1e3 * r['measured_s']:.0f} ms | {p:.2f} | {m:.2f} | {m / p - 1:+.0%} |"
        )
    record = {"versions": versions(), "machine": machine(device), "flops_per_s": flop_rate, "bytes_per_s": byte_rate}
    write_json(RESULTS / "predict.json", record | {"rows": rows})
    head = f"6x128, 1,024 tokens; {flop_rate / 1e9:.0f} GFLOP/s of the MLP's products, "
    head += f"{byte_rate / 1e9:.0f} GB/s of a copy."
    write_text(RESULTS / "predict.md", "\n".join([head, "", *lines, ""]))
    print("\n".join([head, "", *lines]))


if __name__ == "__main__":
    main()
