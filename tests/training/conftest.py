"""A tiny corpus and the smallest model that still has everything."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spheret
from spheret.data import DataConfig, Dataset, prepare
from spheret.models import GPTConfig
from spheret.training import TrainConfig, config_to_dict, train

WORDS = ["the", "norm", "of", "a", "sphere", "turns", "by", "an", "angle", "beta", "over", "p"]

SCRIPT = """
import json, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from spheret.training import TrainingInterrupted, config_from_dict, train
code = 0
for out in sys.argv[2:]:
    try:
        train(config_from_dict(json.loads(sys.argv[1])), out)
    except TrainingInterrupted as stop:
        code = stop.exit_code
        print(code, flush=True)
sys.exit(code)
"""


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
        return TrainConfig(model=model, **({"data": data_config} | settings | changes))

    return build


class Stop(KeyboardInterrupt):
    """Ctrl-C at a chosen step."""


@pytest.fixture(scope="session")
def interrupted() -> Callable[[TrainConfig, Path, Dataset, int], None]:
    """Trains into a folder until a step is logged, then stops as Ctrl-C would."""

    def interrupt(config: TrainConfig, out: Path, dataset: Dataset, step: int) -> None:
        def listen(record: dict[str, Any]) -> None:
            if record["step"] == step:
                raise Stop(f"stopped at step {step}")

        with pytest.raises(Stop):
            train(config, out, dataset=dataset, on_log=listen)

    return interrupt


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """Trains into one folder after the other in a process of its own, which prints how each run was interrupted;
    keywords are environment variables."""

    def start_process(config: TrainConfig, *out: Path, **environment: str) -> subprocess.Popen[str]:
        source = str(Path(spheret.__file__).parents[1])
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(config_to_dict(config)), *map(str, out)],
            env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_process
