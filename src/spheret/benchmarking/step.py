"""Speed of whole optimisation steps, against nanoGPT, in one process and in turn.

A machine that is busy elsewhere slows the variants down together, so the figure to trust is the *ratio* to the
baseline taken round by round, not the seconds of either. A round runs every variant once, in an order that changes, on
the same batch; all variants are in memory at once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spheret.benchmarking.bytes import keep_freed_memory, peak_cpu_bytes
from spheret.benchmarking.nanogpt import NanoGPT, configure_adamw
from spheret.benchmarking.results import TABLE_HEADER, Regression, compare_results, timing, to_table
from spheret.benchmarking.rounds import balanced_order
from spheret.connections import canonical_name
from spheret.models import GPT, GPTConfig
from spheret.training.device import autocast, machine, resolve_device, resolve_dtype, to_device, versions
from spheret.training.optimizer import build_adamw

__all__ = [
    "BASELINE",
    "SAME_OPTIMIZER",
    "TABLE_HEADER",
    "Regression",
    "StepBench",
    "bench_step",
    "compare_results",
    "to_table",
]

BASELINE = "nanogpt"
SAME_OPTIMIZER = "nanogpt (our optimizer)"
FORMAT = 1
LEARNING_RATE, GRAD_CLIP = 6e-4, 1.0

OnSample = Callable[[str, int, float], None]
"""Called with variant, round and seconds after every timed step."""


@dataclass(frozen=True)
class StepBench:
    """What is timed.

    Attributes:
        schemes: connection schemes to set against nanoGPT; see ``spheret schemes``.
        batch_size: sequences of ``block_size`` tokens per step.
        rounds: timed steps of every variant.
        warmup: untimed rounds before them, at least 1: the first step allocates the optimizer's state and compiles.
        compile: run the models through ``torch.compile``, each as one graph.
        dtype: ``auto`` is float32 on CPUs and bfloat16 autocast on CUDA devices that have it.
    """

    schemes: tuple[str, ...] = ("pre-ln", "proj", "cay", "geonorm")
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    vocab_size: int = 257
    batch_size: int = 8
    rounds: int = 20
    warmup: int = 3
    compile: bool = False
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "rounds", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype = {self.dtype!r}: choose auto, float32 or bfloat16")
        names = [canonical_name(scheme) for scheme in self.schemes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"schemes = {self.schemes}: {', '.join(twice)} is there twice; name every scheme once")
        self.model("pre-ln")

    def model(self, scheme: str) -> GPTConfig:
        """The model of this shape with this scheme."""
        shape = {name: getattr(self, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
        return GPTConfig(scheme=scheme, **shape)


@dataclass
class Variant:
    """One model with its optimizer, and the seconds of its timed steps."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[..., tuple[Tensor, Tensor]]
    after_step: Callable[[], None] | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    def step(self, x: Tensor, y: Tensor, precision: AbstractContextManager[object]) -> None:
        """Forward, backward, clip, update: what a trainer does once per batch."""
        with precision:
            _, loss = self.forward(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        if self.after_step is not None:
            self.after_step()
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self) -> int:
        """Parameters, buffers and optimizer state, which stay in memory between steps."""
        state = (t for entry in self.optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers(), *state))


def bench_step(config: StepBench, *, on_sample: OnSample | None = None) -> dict[str, Any]:
    """Time one optimisation step of every scheme against nanoGPT's and return a JSON-able record.

    Variants: ``nanogpt`` (the baseline), ``nanogpt (our optimizer)``,
    which tells what the optimizer contributes, then spheret's GPT with each scheme and the trainer's optimizer. Of
    each: ``seconds`` of every timed step, their median, p10 and p90, tokens/s at the median, ``ratios`` to the
    baseline's step of the same round with median, p10 and p90, and the peak memory that this variant would need alone.

    Raises:
        ValueError: a device this machine does not have.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    precision = autocast(device, dtype)
    variants = build_variants(config, device)
    if device.type == "cpu":
        keep_freed_memory()
    with _enough_compilations(config, len(variants)), collect_between_rounds() as collect:
        for number in range(-config.warmup, config.rounds):
            x, y = batch(config, number, device)
            collect()
            for variant in balanced_order(variants, number):
                seconds = _timed(variant, x, y, precision, device)
                if number >= 0:
                    variant.seconds.append(seconds)
                    if on_sample is not None:
                        on_sample(variant.name, number, seconds)
        if device.type == "cpu":
            for variant in variants:
                variant.peak_bytes = peak_cpu_bytes(partial(variant.step, x, y, precision)) + variant.resident_bytes()
    return {
        "format": FORMAT,
        "kind": "step",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(config)
        | {"schemes": list(config.schemes), "device": device.type, "dtype": str(dtype).removeprefix("torch.")},
        "environment": {"versions": versions(), "machine": machine(device)},
        "baseline": variants[0].name,
        "variants": [
            timing(
                variant.name,
                variant.seconds,
                variants[0].seconds,
                tokens=config.batch_size * config.block_size,
                parameters=sum(p.numel() for p in variant.model.parameters()),
                peak_bytes=variant.peak_bytes,
            )
            for variant in variants
        ],
    }


def build_variants(config: StepBench, device: torch.device) -> list[Variant]:
    """The two nanoGPT variants and one for every scheme, all on `device`, the weights drawn from one seed."""
    variants = []
    for name in (BASELINE, SAME_OPTIMIZER, *map(canonical_name, config.schemes)):
        torch.manual_seed(config.seed)
        theirs = name in (BASELINE, SAME_OPTIMIZER)
        model = (NanoGPT(config.model("pre-ln")) if theirs else GPT(config.model(name))).to(device).train()
        build = configure_adamw if name == BASELINE else build_adamw
        forward = torch.compile(model, fullgraph=True) if config.compile else model
        after_step = model.after_step if isinstance(model, GPT) else None
        variants.append(Variant(name, model, build(model, lr=LEARNING_RATE), forward, after_step))
    return variants


def batch(config: StepBench, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random ids (B, T) and their successors, a function of seed and round: the work does not depend on the text."""
    rng = np.random.default_rng([config.seed, number + config.warmup])
    tokens = rng.integers(config.vocab_size, size=(config.batch_size, config.block_size + 1))
    x, y = (to_device(np.ascontiguousarray(part), device) for part in (tokens[:, :-1], tokens[:, 1:]))
    return x, y


def _timed(
    variant: Variant, x: Tensor, y: Tensor, precision: AbstractContextManager[object], device: torch.device
) -> float:
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    variant.step(x, y, precision)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    if cuda:  # every variant's weights are on the device: count this one's and what its step added
        variant.peak_bytes = torch.cuda.max_memory_allocated(device) - before + variant.resident_bytes()
    return seconds


@contextmanager
def collect_between_rounds() -> Iterator[Callable[[], object]]:
    """No garbage collection inside a timed step; the caller collects between rounds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield gc.collect
    finally:
        if enabled:
            gc.enable()


def _enough_compilations(config: StepBench, variants: int) -> AbstractContextManager[object]:
    """All schemes share the code of GPT.forward, and the compiler by default gives up on a function's ninth version."""
    if not config.compile:
        return nullcontext()
    torch.compiler.reset()
    patch: AbstractContextManager[object] = torch._dynamo.config.patch(recompile_limit=max(8, 2 * variants))
    return patch
