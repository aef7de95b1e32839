"""A tiny corpus and the smallest model that still has everything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from spheret.data import DataConfig, Dataset, prepare
from spheret.models import GPTConfig
from spheret.training import TrainConfig

WORDS = ["the", "norm", "of", "a", "sphere", "turns", "by", "an", "angle", "beta", "over", "p"]


@pytest.fixture(scope="session")
def data_config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(20):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(400)))
    return DataConfig(data=(str(folder),), cache=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def dataset(data_config: DataConfig) -> Dataset:
    return prepare(data_config)


@pytest.fixture(scope="session")
def tiny(data_config: DataConfig) -> Callable[..., TrainConfig]:
    """Builds a configuration from what differs: `scheme` and `dropout` go to the model, the rest to the run."""

    def build(scheme: str = "pre-ln", dropout: float = 0.0, **changes: Any) -> TrainConfig:
        model = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257, scheme=scheme, dropout=dropout)
        settings: dict[str, Any] = {"steps": 6, "batch_size": 4, "eval_windows": 8, "log_interval": 1, "device": "cpu"}
        return TrainConfig(model=model, data=data_config, **(settings | changes))

    return build
