"""Speed of whole optimisation steps against nanoGPT: all variants in one process, taking turns.

A round times one step of every variant on the same batch, in an order that changes from round to round. All variants
are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spheret.benchmarking.measuring import (
    OnSample,
    balanced_order,
    collect_between_rounds,
    keep_freed_memory,
    peak_cpu_bytes,
    timed,
)
from spheret.benchmarking.nanogpt import NanoGPT, configure_adamw
from spheret.benchmarking.results import record, timing
from spheret.connections import canonical_name
from spheret.models import GPT, GPTConfig
from spheret.training.device import autocast, resolve_device, resolve_dtype, to_device
from spheret.training.optimizer import build_adamw

BASELINE = "nanogpt"
SAME_OPTIMIZER = "nanogpt (our optimizer)"
LEARNING_RATE, GRAD_CLIP = 6e-4, 1.0  # the time of a step does not depend on them


@dataclass(frozen=True)
class StepBench:
    """What is timed. Batch and vocabulary have defaults of their own, those of the committed results."""

    schemes: tuple[str, ...] = ("pre-ln", "proj", "cay", "geonorm")
    """Schemes to time beside nanoGPT (see `spheret schemes`)."""
    n_layer: int = GPTConfig.n_layer
    """Blocks, each an attention and an MLP sublayer."""
    n_head: int = GPTConfig.n_head
    """Attention heads."""
    n_embd: int = GPTConfig.n_embd
    """Width d of the hidden state."""
    block_size: int = GPTConfig.block_size
    """Context length, tokens."""
    vocab_size: int = 257
    """Rows of the embedding and the head."""
    batch_size: int = 8
    """Sequences per step."""
    rounds: int = 20
    """Timed steps of every variant."""
    warmup: int = 3
    """Untimed rounds before the timed ones, at least 1: the first step allocates the optimizer's state and compiles."""
    compile: bool = False
    """Run the models through torch.compile, each as one graph."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: float32 on CPUs, bfloat16 on GPUs that have it."""
    seed: int = 0
    """Decides weights and batches. The time does not depend on them."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "rounds", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype = {self.dtype!r}: choose auto, float32 or bfloat16")
        names = [canonical_name(scheme) for scheme in self.schemes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"schemes = {self.schemes}: {', '.join(twice)} is given twice; name every scheme once")
        self.model("pre-ln")  # GPTConfig checks the shape

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
        """Forward, backward, clip, update: what a trainer does once per batch of ids x, y (B, T)."""
        with precision:
            _, loss = self.forward(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        if self.after_step is not None:
            self.after_step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_step(
        self, x: Tensor, y: Tensor, precision: AbstractContextManager[object], device: torch.device
    ) -> float:
        """Seconds of one ``step``; on CUDA it also records the peak memory."""
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        seconds = timed(partial(self.step, x, y, precision), device)
        if cuda:  # all variants are on the device: count only this one's tensors, and what its step added
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - before + self.resident_bytes()
        return seconds

    def resident_bytes(self) -> int:
        """Parameters, buffers and optimizer state, which stay in memory between steps."""
        state = (t for entry in self.optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers(), *state))


def bench_step(config: StepBench, *, on_sample: OnSample | None = None) -> dict[str, Any]:
    """Time one optimisation step of every scheme against nanoGPT's and return a record for JSON.

    The variants are ``nanogpt`` (the baseline), ``nanogpt (our optimizer)``, which shows what the optimizer
    contributes, and spheret's GPT with each scheme and the trainer's optimizer. The record of a variant is that of
    `timing`, with the peak memory that the variant would need alone.

    Raises:
        ValueError: a device that this machine does not have.
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
                seconds = variant.timed_step(x, y, precision, device)
                if number >= 0:
                    variant.seconds.append(seconds)
                    if on_sample is not None:
                        on_sample(variant.name, number, seconds)
        if device.type == "cpu":  # after the timing, because the profiler that finds the peak slows a step down
            for variant in variants:
                variant.peak_bytes = peak_cpu_bytes(partial(variant.step, x, y, precision)) + variant.resident_bytes()
    return record(
        "step",
        asdict(config) | {"device": device.type, "dtype": str(dtype).removeprefix("torch.")},
        device,
        baseline=variants[0].name,
        variants=[
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
    )


def build_variants(config: StepBench, device: torch.device) -> list[Variant]:
    """The two nanoGPT variants and one per scheme, all on `device`, each with weights drawn from the same seed."""
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
    """Random ids (B, T) and their successors, from seed and round. The work does not depend on the text."""
    # Warm-up rounds have negative numbers, which a seed must not have.
    rng = np.random.default_rng([config.seed, number + config.warmup])
    tokens = rng.integers(config.vocab_size, size=(config.batch_size, config.block_size + 1))
    x, y = (to_device(np.ascontiguousarray(part), device) for part in (tokens[:, :-1], tokens[:, 1:]))
    return x, y


def _enough_compilations(config: StepBench, variants: int) -> AbstractContextManager[object]:
    """All variants share the code of GPT.forward, and the compiler gives up on the ninth version of a function."""
    if not config.compile:
        return nullcontext()
    torch.compiler.reset()
    patch: AbstractContextManager[object] = torch._dynamo.config.patch(recompile_limit=max(8, 2 * variants))
    return patch
