"""One process trains into a folder, and one process trains a run."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spheret.data import Dataset
from spheret.training import RunBusy, TrainConfig, read_metrics, read_result, train

Tiny = Callable[..., TrainConfig]


def test_a_second_training_run_into_a_folder_is_refused_and_changes_nothing(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, start: Callable[..., subprocess.Popen[str]]
) -> None:
    config = tiny(steps=1_000_000, warmup_ratio=0, checkpoint_interval=5, eval_interval=100_000)
    process = start(config, tmp_path)
    try:
        while len(read_metrics(tmp_path)) < 3:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        stored = (tmp_path / "config.json").read_bytes()
        for resume in (False, True):
            with pytest.raises(RunBusy, match=f"another process is training into {tmp_path}"):
                train(tiny(seed=2), tmp_path, dataset=dataset, resume=resume)
        assert (tmp_path / "config.json").read_bytes() == stored
        process.terminate()
        assert process.wait(timeout=60) == 128 + 15
    finally:
        process.kill()
        process.communicate()
    assert read_result(tmp_path).outcome == "interrupted"
    steps = [line["step"] for line in read_metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1)), "one writer"


def test_two_threads_count_as_two(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    refused: list[BaseException] = []

    def second() -> None:
        try:
            train(tiny(seed=2), tmp_path, dataset=dataset)
        except RunBusy as error:
            refused.append(error)

    def listen(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            other = threading.Thread(target=second)
            other.start()
            other.join()

    assert train(tiny(), tmp_path, dataset=dataset, on_log=listen).outcome == "finished"
    assert len(refused) == 1
    assert read_result(tmp_path).step == 6


def test_the_lock_goes_with_its_holder(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train(tiny(), tmp_path, dataset=dataset, on_log=fail)
    assert train(tiny(), tmp_path, dataset=dataset).outcome == "finished"


def test_several_ranks_are_refused_with_the_reason(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but training runs in one process"):
        train(tiny(), tmp_path / "run", dataset=dataset)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(tiny(), tmp_path / "run", dataset=dataset).outcome == "finished"
