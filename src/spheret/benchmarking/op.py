"""Speed of one residual connection alone, forward and backward, against the Euclidean ones, in one process and in turn.

What a block makes of a stream ``h`` and an update ``f`` (rows, d): the next stream and the input of the next
sublayer, each of which sends a gradient back. Pre-LN makes ``s = h + f`` and ``LN(s)``; a sphere connection makes
``h'``, which is both. Gradients of everything that learns are taken and not accumulated. ``add`` is the bare
addition, the floor. ``copy`` copies one tensor of the stream's size: its speed is the bandwidth that the others'
bytes (:func:`moved_bytes`, of eager variants) are set against.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from spheret.benchmarking.bytes import copy_function, flush_function, keep_freed_memory, moved_bytes
from spheret.benchmarking.results import timing
from spheret.benchmarking.rounds import balanced_order
from spheret.benchmarking.step import FORMAT, OnSample, collect_between_rounds
from spheret.connections import build_connection, canonical_name
from spheret.connections.base import Connection
from spheret.training.device import machine, resolve_device, versions

ADD, COPY, COMPILED = "add", "copy", " (compiled)"
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OpBench:
    """What is timed.

    Attributes:
        schemes: connections; the first is the baseline of the ratios. A name may end in `` (compiled)``.
        rows: tokens.
        dim: width d.
        rounds: timed calls of every variant; twice as many as there are variants give each the same predecessors.
        warmup: untimed rounds before them, at least 1.
        dtype: of the stream and the update.
        cold: empty the caches before every call. In a training they hold a sublayer's weights and activations by then;
            here, what the variant before has left.
    """

    schemes: tuple[str, ...] = (
        "pre-ln",
        "pre-ln (compiled)",
        "pre-ln:norm=rmsnorm",
        "pre-ln:norm=rmsnorm (compiled)",
        "post-ln",
        "peri-ln",
        "keel",
        "pre-dyt",
        "ngpt",
        "spheret:p=0.5",
        "proj",
        "cay",
        "spheret:p=3",
        "geonorm",
        "spheret:p=learn-per-layer",
        "proj (compiled)",
    )
    rows: int = 4096
    dim: int = 768
    rounds: int = 40
    warmup: int = 3
    device: str = "auto"
    dtype: str = "float32"
    cold: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "rounds", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if self.dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"dtype = {self.dtype!r}: choose float32, bfloat16, float16 or float64")
        for scheme in self.schemes:
            canonical_name(scheme.removesuffix(COMPILED))


class Junction(nn.Module):
    """A connection and the branch input behind it: (h, f) -> (next stream, input of the next sublayer)."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def forward(self, h: Tensor, f: Tensor) -> Pair:
        stream, read = self.connection.combine_and_split(h, f)
        return stream, self.connection.branch_input(read)


def bench_op(config: OpBench, *, on_sample: OnSample | None = None) -> dict[str, Any]:
    """Time every variant in every round and return a JSON-able record; ratios are to the first scheme, round by
    round."""
    device = resolve_device(config.device)
    dtype = getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (config.rows, config.dim)
    h, f, g1, g2 = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    h, f = h.requires_grad_(), f.requires_grad_()
    variants = _variants(config, device)
    copy = copy_function(h)
    calls = {COPY: copy} | {
        name: partial(_call, function, [h, f, *learned], (g1, g2)) for name, (function, learned) in variants.items()
    }
    names = tuple(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    flush = flush_function(device) if config.cold else None
    if device.type == "cpu":
        keep_freed_memory()
    with collect_between_rounds() as collect:
        for number in range(-config.warmup, config.rounds):
            collect()
            order = balanced_order(names, number)
            calls[order[-1]]()  # so that the first of a round follows a variant, too
            for name in order:
                if flush is not None:
                    flush()
                taken = _timed(calls[name], device)
                if number >= 0:
                    seconds[name].append(taken)
                    if on_sample is not None:
                        on_sample(name, number, taken)
    baseline, bandwidth = seconds[config.schemes[0]], 2 * h.numel() * h.element_size() / median(seconds[COPY])
    return {
        "format": FORMAT,
        "kind": "op",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(config) | {"schemes": list(config.schemes), "device": device.type},
        "environment": {"versions": versions(), "machine": machine(device)},
        "baseline": config.schemes[0],
        "copy_bytes_per_s": bandwidth,
        "variants": [
            timing(
                name,
                taken,
                baseline,
                tokens=config.rows,
                parameters=sum(p.numel() for p in variants[name][1]) if name in variants else 0,
                moved_bytes=None if name.endswith(COMPILED) else moved_bytes(calls[name]),
                bandwidth=bandwidth,
            )
            for name, taken in seconds.items()
        ],
    }


def _variants(config: OpBench, device: torch.device) -> dict[str, tuple[Callable[..., Pair], list[Tensor]]]:
    """Each variant with the parameters whose gradients it takes."""
    variants: dict[str, tuple[Callable[..., Pair], list[Tensor]]] = {ADD: (_add, [])}
    for scheme in config.schemes:
        connection = build_connection(scheme.removesuffix(COMPILED), dim=config.dim, layer_idx=1, n_layer=12)
        junction = Junction(connection).to(device)
        function = torch.compile(junction, fullgraph=True, dynamic=False) if scheme.endswith(COMPILED) else junction
        variants[scheme] = function, list(junction.parameters())
    return variants


def _add(h: Tensor, f: Tensor) -> Pair:
    stream = h + f
    return stream, stream


def _call(function: Callable[..., Pair], inputs: list[Tensor], gradients: Pair) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*inputs[:2]), inputs, gradients)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
