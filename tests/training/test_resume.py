from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from spheret.connections import list_schemes
from spheret.data import Dataset
from spheret.training import (
    TrainConfig,
    TrainingInterrupted,
    checkpoints,
    load_model,
    read_metrics,
    read_result,
    train,
)
from spheret.training.checkpoint import load_checkpoint, save_checkpoint
from spheret.training.state import TrainState, initial_state
from spheret.training.update import update_parameters

Tiny = Callable[..., TrainConfig]
CPU = torch.device("cpu")
TIMED = ("tokens_per_s", "elapsed_s")


class Stop(KeyboardInterrupt):
    """Ctrl-C at a chosen step."""


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    def listen(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Stop(f"stopped at step {step}")

    return listen


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMED} for line in read_metrics(folder)]


def interrupted(config: TrainConfig, out: Path, dataset: Dataset, step: int) -> None:
    with pytest.raises(Stop):
        train(config, out, dataset=dataset, on_log=stop_at(step))


@pytest.mark.parametrize("scheme", list_schemes())
def test_twenty_steps_are_ten_and_ten(scheme: str, tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    """Stopped at step 13, so that three steps after the checkpoint are lost and done again."""
    config = tiny(scheme=scheme, dropout=0.1, steps=20, checkpoint_interval=10, eval_interval=5)
    train(config, tmp_path / "straight", dataset=dataset)
    interrupted(config, tmp_path / "halved", dataset, 13)
    assert [path.name for path in checkpoints(tmp_path / "halved")] == ["step_0000010"]
    torch.rand(7)
    result = train(config, tmp_path / "halved", dataset=dataset, resume=True)

    straight, halved = (load_model(tmp_path / name).state_dict() for name in ("straight", "halved"))
    assert [name for name in straight if not torch.equal(straight[name], halved[name])] == []
    assert untimed(tmp_path / "straight") == untimed(tmp_path / "halved")
    assert [line["step"] for line in read_metrics(tmp_path / "halved")] == list(range(1, 21))
    assert result.val_loss == read_result(tmp_path / "straight").val_loss
    assert result.train_loss == read_result(tmp_path / "straight").train_loss


def test_moments_counters_and_dtypes_come_back(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(scheme="spheret:p=learn")
    saved, loaded = trained_state(config, 3), initial_state(config, CPU)
    saved.skipped, saved.seconds = 2, 1.5
    folder = save_checkpoint(tmp_path, saved, config, "data")
    random = torch.rand(3)
    load_checkpoint(folder, loaded, "data")
    assert torch.equal(torch.rand(3), random)
    assert (loaded.step, loaded.skipped, loaded.seconds) == (3, 2, 1.5)
    assert loaded.monitor.state_dict() == saved.monitor.state_dict()
    for a, b in zip(saved.optimizer.state.values(), loaded.optimizer.state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
    assert [group["lr_scale"] for group in loaded.optimizer.param_groups] == [
        group["lr_scale"] for group in saved.optimizer.param_groups
    ]


def trained_state(config: TrainConfig, steps: int) -> TrainState:
    state = initial_state(config, CPU)
    for _ in range(steps):
        x = torch.randint(0, 257, (2, 8))
        _, loss = state.model(x, x)
        loss.backward()
        update_parameters(state, 1e-3, 1.0)
        state.monitor.update(loss.item())
        state.step += 1
    return state


def test_nothing_of_the_checkpoint_stays_alive_after_loading(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    folder = save_checkpoint(tmp_path, trained_state(config, 1), config, "data")
    loaded: list[weakref.ref[Any]] = []
    original = torch.load

    class Watched(dict):  # type: ignore[type-arg]
        """A dict that can be referred to weakly."""

    def load(*args: Any, **kwargs: Any) -> Any:
        assert (kwargs["map_location"], kwargs["weights_only"]) == ("cpu", True)
        value = Watched(original(*args, **kwargs))
        loaded.append(weakref.ref(value))
        return value

    monkeypatch.setattr(torch, "load", load)
    state = initial_state(config, CPU)
    load_checkpoint(folder, state, "data")
    gc.collect()
    assert len(loaded) == 1 and loaded[0]() is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"lr": 0.5}, "lr"), ({"steps": 40}, "steps"), ({"seed": 3, "beta1": 0.8}, "beta1, seed")],
)
def test_another_configuration_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, changes: dict[str, Any], named: str
) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    with pytest.raises(ValueError, match=f"other values of {named};"):
        train(replace(config, **changes), tmp_path, dataset=dataset, resume=True)
    with pytest.raises(ValueError, match=r"other values of model\.n_layer, model\.scheme;"):
        model = replace(config.model, n_layer=3, scheme="geonorm")
        train(replace(config, model=model), tmp_path, dataset=dataset, resume=True)


def test_what_does_not_change_the_training_may_change(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    changed = replace(config, log_interval=3, eval_interval=1, checkpoint_interval=0, keep_checkpoints=0)
    assert train(changed, tmp_path, dataset=dataset, resume=True).outcome == "finished"


def test_other_data_is_refused(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    with pytest.raises(ValueError, match="fingerprint"):
        train(config, tmp_path, dataset=replace(dataset, fingerprint="other"), resume=True)


def test_resuming_a_finished_run_returns_its_result(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    result = train(tiny(save_final=False), tmp_path, dataset=dataset)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert train(tiny(save_final=False), tmp_path, dataset=dataset, resume=True) == result
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_resuming_where_there_is_no_run_is_refused(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    with pytest.raises(FileNotFoundError, match="start the run without resume"):
        train(tiny(), tmp_path / "nothing", dataset=dataset, resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_stopped_before_its_first_checkpoint_starts_over(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, resume: bool
) -> None:
    interrupted(tiny(), tmp_path, dataset, 3)
    assert read_result(tmp_path).outcome == "interrupted"
    assert train(tiny(), tmp_path, dataset=dataset, resume=resume).outcome == "finished"
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_run_stopped_after_its_last_step_is_concluded(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    config = tiny(checkpoint_interval=6)
    finished = train(config, tmp_path, dataset=dataset)
    (tmp_path / "run.json").unlink()
    resumed = train(config, tmp_path, dataset=dataset, resume=True)
    assert resumed.outcome == "finished"
    assert (resumed.val_loss, resumed.train_loss) == (finished.val_loss, finished.train_loss)


def test_only_the_newest_checkpoints_are_kept(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    def kept(keep: int) -> list[str]:
        out = tmp_path / str(keep)
        train(tiny(checkpoint_interval=2, keep_checkpoints=keep), out, dataset=dataset)
        assert sorted(os.listdir(out / "checkpoints")) == [path.name for path in checkpoints(out)]
        return [path.name for path in checkpoints(out)]

    assert kept(2) == ["step_0000004", "step_0000006"]
    assert kept(0) == ["step_0000002", "step_0000004", "step_0000006"]


def test_leftovers_of_a_killed_save_are_passed_over_and_swept(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 5)
    leftover = tmp_path / "checkpoints" / ".step_0000006.1.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path)[-1].name == "step_0000004"
    assert train(config, tmp_path, dataset=dataset, resume=True).outcome == "finished"
    assert not leftover.exists()


def test_weights_that_do_not_fit_are_listed(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    train(tiny(), tmp_path, dataset=dataset)
    file = checkpoints(tmp_path)[-1] / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["surplus"] = weights.pop("wpe.weight")
    safetensors.torch.save_file(weights, file)
    with pytest.raises(ValueError, match=r"missing \['wpe\.weight'\], unknown \['surplus'\]"):
        load_model(tmp_path)


def test_load_model_takes_a_run_or_a_checkpoint(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    train(tiny(checkpoint_interval=3), tmp_path, dataset=dataset)
    first, last = checkpoints(tmp_path)
    newest = load_model(tmp_path).state_dict()
    assert all(torch.equal(value, newest[name]) for name, value in load_model(str(last)).state_dict().items())
    assert not torch.equal(load_model(first).state_dict()["wte.weight"], newest["wte.weight"])
    assert not load_model(first).training
    with pytest.raises(FileNotFoundError, match="save_final"):
        load_model(tmp_path / "checkpoints")


def test_a_stop_is_a_keyboard_interrupt() -> None:
    error = TrainingInterrupted(15)
    assert isinstance(error, KeyboardInterrupt)
    assert (error.exit_code, str(error)) == (143, "interrupted by SIGTERM")
