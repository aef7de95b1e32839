"""Bytes counted on fake tensors against those of real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spheret.benchmarking.measuring import peak_cpu_bytes
from spheret.connections import list_schemes
from spheret.costs.memory import StepMemory, in_bfloat16, recompute_blocks, step_memory
from spheret.models import GPTConfig
from spheret.training import TrainConfig
from spheret.training.device import autocast
from spheret.training.state import initial_state
from spheret.training.step import accumulate_gradients, clip_gradients, update_parameters

CPU = torch.device("cpu")

SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 64, "block_size": 128, "vocab_size": 97}
GPT2_LARGE = {"n_layer": 36, "n_head": 20, "n_embd": 1280, "block_size": 1024, "vocab_size": 50304}


def config(scheme: str, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {"batch_size": 4, "dtype": "float32", "device": "cpu", **changes}
    return TrainConfig(model=GPTConfig(scheme=scheme, **SHAPE), **settings)


class RealStep:
    """An optimizer step of the trainer, for a model that has made its first."""

    def __init__(self, run: TrainConfig, recompute: bool = False) -> None:
        self.run, self.state = run, initial_state(run, CPU)
        self.model = self.state.model
        if recompute:
            recompute_blocks(self.model)
        self.context = autocast(CPU, torch.bfloat16 if run.dtype == "bfloat16" else torch.float32)
        shape = (run.batch_size, run.model.block_size)
        self.x, self.y = np.random.default_rng(0).integers(run.model.vocab_size, size=(2, *shape))
        self()

    def __call__(self) -> None:
        accumulate_gradients(
            self.model, self.x, self.y, micro_batches=self.run.grad_accum, device=CPU, context=self.context
        )
        update_parameters(self.state, 1e-3, clip_gradients(self.model.parameters(), self.run.grad_clip))

    def static(self) -> tuple[int, int]:
        """Bytes of weights and of the optimizer."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        moments = [v for state in self.state.optimizer.state.values() for v in state.values()]
        return sum(t.nbytes for t in weights), sum(t.nbytes for t in moments)

    def left_behind(self) -> int:
        """Bytes that a forward pass leaves: tokens, logits, loss, and what it saves for the backward pass but the
        parameters, each storage once."""
        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self.model(x, y)
        kept |= {t.untyped_storage().data_ptr(): t for t in (x, *outputs)}
        known = {t.untyped_storage().data_ptr() for t in (y, *self.model.parameters(), *self.model.buffers())}
        return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in known)


@pytest.mark.parametrize("scheme", list_schemes())
def test_bytes_agree_with_a_real_step(scheme: str) -> None:
    run = config(scheme)
    counted, real = step_memory(run), RealStep(run)
    weights, moments = real.static()
    assert (counted.weights, counted.optimizer) == (weights, moments)
    assert counted.gradients == sum(p.nbytes for p in real.model.parameters())
    assert counted.activations == pytest.approx(real.left_behind(), rel=0.01)
    assert counted.peak == pytest.approx(weights + moments + peak_cpu_bytes(real), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [({"grad_accum": 2}, False), ({"dtype": "bfloat16"}, False), ({}, True), ({"grad_accum": 4}, True)],
    ids=str,
)
@pytest.mark.parametrize("scheme", ["pre-ln", "proj"])
def test_peak_of_other_ways_to_run(scheme: str, changes: dict[str, Any], recompute: bool) -> None:
    run = config(scheme, **changes)
    real = RealStep(run, recompute)
    assert step_memory(run, recompute=recompute).peak == pytest.approx(
        sum(real.static()) + peak_cpu_bytes(real), rel=0.02
    )


def test_recomputing_keeps_one_state_for_each_block() -> None:
    run = config("post-ln")
    plain, recomputed = step_memory(run), step_memory(run, recompute=True)
    rows = run.batch_size * run.model.block_size
    head = rows * (3 * run.model.n_embd + 2 * run.model.vocab_size) * 4  # its input and their norm; logits, softmax
    assert recomputed.activations - head < 1.3 * run.model.n_layer * rows * run.model.n_embd * 4
    assert recomputed.activations < 0.5 * plain.activations and recomputed.peak < plain.peak
    assert same(plain) == same(recomputed)


def same(memory: StepMemory) -> tuple[int, int, int]:
    return memory.weights, memory.gradients, memory.optimizer


def test_activations_are_proportional_to_the_rows_and_linear_in_the_depth() -> None:
    def activations(change: Callable[[dict[str, int]], None], rows: int = 4) -> int:
        shape = dict(SHAPE)
        change(shape)
        model = GPTConfig(scheme="proj", **shape)
        return step_memory(TrainConfig(model=model, batch_size=rows, device="cpu")).activations

    depths = [activations(lambda shape, n=n: shape.update(n_layer=n)) for n in (2, 3, 6)]
    assert depths[2] - depths[1] == 3 * (depths[1] - depths[0])
    one, two, four = (activations(lambda _: None, rows) for rows in (1, 2, 4))
    assert four - two == 2 * (two - one)


def test_nothing_is_allocated_for_a_large_model() -> None:
    run = TrainConfig(model=GPTConfig(scheme="cay", **GPT2_LARGE | {"n_layer": 2}), batch_size=64)
    assert peak_cpu_bytes(lambda: step_memory(run)) < 1e6
    assert step_memory(run).peak > 50e9


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("auto", "auto", True), ("cpu", "auto", False), ("cuda", "float32", False), ("cpu", "bfloat16", True)],
)
def test_precision_is_that_of_the_machine_it_is_meant_for(device: str, dtype: str, expected: bool) -> None:
    assert in_bfloat16(config("pre-ln", device=device, dtype=dtype)) == expected
