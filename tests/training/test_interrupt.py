"""Real processes, stopped by real signals."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spheret.data import Dataset
from spheret.training import TrainConfig, TrainingInterrupted, checkpoints, load_model, read_metrics, train

Tiny = Callable[..., TrainConfig]
Start = Callable[..., subprocess.Popen[str]]


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Until the running process has logged `step`."""
    while not any(line["step"] >= step for line in read_metrics(out)):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


@pytest.fixture
def endless(tiny: Tiny) -> TrainConfig:
    return tiny(steps=1_000_000, warmup_ratio=0, checkpoint_interval=100_000, eval_interval=5)


def test_a_signal_leaves_a_whole_folder(endless: TrainConfig, tmp_path: Path, dataset: Dataset, start: Start) -> None:
    """Three runs of one process, each stopped by another signal."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    process = start(endless, *(tmp_path / number.name for number in numbers))
    assert process.stdout is not None
    try:
        for number in numbers:
            wait_for_step(process, tmp_path / number.name, 12)
            process.send_signal(number)
            assert process.stdout.readline() == f"{128 + number}\n"
        assert process.wait(timeout=60) == 128 + number
    finally:
        process.kill()
        process.communicate()
    for number in numbers:
        out = tmp_path / number.name
        run, lines = json.loads((out / "run.json").read_text()), read_metrics(out)
        assert (run["outcome"], run["reason"]) == ("interrupted", f"interrupted by {number.name}")
        assert run["final"]["step"] == lines[-1]["step"] >= 12
        assert run["final"]["val_loss"] == [line["val_loss"] for line in lines if "val_loss" in line][-1]
        assert run["final"]["val_step"] == [line["step"] for line in lines if "val_loss" in line][-1]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert int(checkpoints(out)[-1].name[5:]) == run["final"]["step"], "nothing that was trained is lost"
        assert load_model(out).config == endless.model


def test_a_killed_run_can_be_read_and_resumed(tiny: Tiny, tmp_path: Path, dataset: Dataset, start: Start) -> None:
    config = tiny(steps=120, dropout=0.1, checkpoint_interval=9, eval_interval=50)
    process = start(config, tmp_path / "killed")
    try:
        wait_for_step(process, tmp_path / "killed", 20)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert json.loads((tmp_path / "killed" / "config.json").read_text())["steps"] == 120
    assert not (tmp_path / "killed" / "run.json").exists()
    assert len(read_metrics(tmp_path / "killed")) >= 20

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the killed process
    try:
        train(config, tmp_path / "killed", dataset=dataset, resume=True)
        train(config, tmp_path / "straight", dataset=dataset)
    finally:
        torch.set_num_threads(threads)
    killed, straight = (load_model(tmp_path / name).state_dict() for name in ("killed", "straight"))
    assert all(torch.equal(killed[name], straight[name]) for name in straight)
    assert [line["step"] for line in read_metrics(tmp_path / "killed")] == list(range(1, 121))


def test_without_checkpoints_a_stop_writes_none(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    def stop(record: dict[str, object]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        train(tiny(checkpoint_interval=0), tmp_path, dataset=dataset, on_log=stop)
    assert json.loads((tmp_path / "run.json").read_text())["final"]["step"] == 3
    assert checkpoints(tmp_path) == []


def test_the_callers_signal_handlers_come_back(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(tiny(), tmp_path, dataset=dataset)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_stop_is_a_keyboard_interrupt() -> None:
    error = TrainingInterrupted(15)
    assert isinstance(error, KeyboardInterrupt)
    assert (error.exit_code, str(error)) == (143, "interrupted by SIGTERM")


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO])
def test_a_listener_whose_output_is_gone_stops_the_run_like_a_signal(
    error: int, tiny: Tiny, tmp_path: Path, dataset: Dataset
) -> None:
    def listen(record: dict[str, object]) -> None:
        if record["step"] == 3:
            raise OSError(error, os.strerror(error))

    with pytest.raises(TrainingInterrupted, match="SIGPIPE"):
        train(tiny(), tmp_path, dataset=dataset, on_log=listen)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_0000003"]
    assert json.loads((tmp_path / "run.json").read_text())["reason"] == "interrupted by SIGPIPE"
    assert train(tiny(), tmp_path, dataset=dataset, resume=True).outcome == "finished"


def test_another_error_of_a_listener_is_raised(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    def listen(record: dict[str, object]) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        train(tiny(), tmp_path, dataset=dataset, on_log=listen)


def test_nohup_is_respected(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = train(tiny(), tmp_path, dataset=dataset, on_log=lambda record: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.outcome == "finished"
