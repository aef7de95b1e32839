"""The smallest model, timed once for all tests of this room."""

from __future__ import annotations

from typing import Any

import pytest

from spheret.benchmarking.step import StepBench, bench_step

TINY: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 8,
    "vocab_size": 31,
    "batch_size": 2,
    "rounds": 3,
    "warmup": 1,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def samples() -> list[tuple[str, int]]:
    return []


@pytest.fixture(scope="session")
def result(samples: list[tuple[str, int]]) -> dict[str, Any]:
    config = StepBench(schemes=("pre-ln", "spheret:p=1", "spheret:p=learn"), **TINY)
    return bench_step(config, on_sample=lambda name, number, seconds: samples.append((name, number)))
