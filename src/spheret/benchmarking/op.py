"""Speed of one residual connection alone, forward and backward: all variants in one process, taking turns.

A variant does what a block does with a hidden state ``h`` and a sublayer output ``f`` (rows, d). It makes the next
hidden state and the input of the next sublayer, and each of the two sends a gradient back. Pre-LN makes ``s = h + f``
and ``LN(s)``; a sphere connection makes ``h'``, which is both. Gradients are computed for ``h``, ``f`` and every
parameter, and are not accumulated. ``add``, the bare addition, is the floor. ``copy`` copies one tensor of the size of
``h``. Its speed is the bandwidth with which the other variants are compared, by the bytes that they move
(:func:`moved_bytes`, for eager variants only).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from spheret.benchmarking.measuring import (
    OnSample,
    balanced_order,
    collect_between_rounds,
    copy_function,
    flush_function,
    keep_freed_memory,
    moved_bytes,
    timed,
)
from spheret.benchmarking.results import record, timing
from spheret.connections import build_connection, canonical_name
from spheret.connections.base import Connection
from spheret.training.device import resolve_device

ADD, COPY, COMPILED = "add", "copy", " (compiled)"
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OpBench:
    """What is timed."""

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
    """Schemes; the first is the baseline of the ratios. Names that end in " (compiled)" go through torch.compile."""
    rows: int = 4096
    """Rows of the hidden state, one per token."""
    dim: int = 768
    """Width d of the hidden state."""
    rounds: int = 40
    """Timed calls of every variant. With twice as many rounds as variants, each follows every other equally often."""
    warmup: int = 3
    """Untimed rounds before the timed ones, at least 1."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "float32"
    """Dtype of the hidden state and the sublayer output: float32, bfloat16, float16 or float64."""
    cold: bool = False
    """Empty the caches before every call, as a sublayer does in training.

    Otherwise they hold the data of the variant before.
    """

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "rounds", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if self.dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"dtype = {self.dtype!r}: choose float32, bfloat16, float16 or float64")
        for scheme in self.schemes:
            canonical_name(scheme.removesuffix(COMPILED))


class Junction(nn.Module):
    """A connection and the branch input after it: h, f (rows, d) -> next hidden state, input of the next sublayer."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def forward(self, h: Tensor, f: Tensor) -> Pair:
        stream, branch = self.connection(h, f, split=True)
        return stream, self.connection.branch_input(branch)


def bench_op(config: OpBench, *, on_sample: OnSample | None = None) -> dict[str, Any]:
    """Time every variant in every round and return a record for JSON, with ratios to the first scheme.

    Raises:
        ValueError: a device that this machine does not have.
    """
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
            calls[order[-1]]()  # untimed, so that the first of a round follows a variant and not the garbage collection
            for name in order:
                if flush is not None:
                    flush()
                taken = timed(calls[name], device)
                if number >= 0:
                    seconds[name].append(taken)
                    if on_sample is not None:
                        on_sample(name, number, taken)
    baseline, bandwidth = seconds[config.schemes[0]], 2 * h.numel() * h.element_size() / median(seconds[COPY])
    return record(
        "op",
        asdict(config) | {"device": device.type},
        device,
        baseline=config.schemes[0],
        copy_bytes_per_s=bandwidth,
        variants=[
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
    )


def _variants(config: OpBench, device: torch.device) -> dict[str, tuple[Callable[..., Pair], list[Tensor]]]:
    """Each variant with the parameters whose gradients it takes."""
    variants: dict[str, tuple[Callable[..., Pair], list[Tensor]]] = {ADD: (_add, [])}
    for scheme in config.schemes:
        # Not layer 0, where some schemes differ (the first attention of Keel is Pre-LN).
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
