"""What a checkpoint restores, and that a folder holds complete checkpoints only."""

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
from torch import Tensor

from spheret.connections import list_schemes
from spheret.data import Dataset
from spheret.training import DamagedCheckpoint, TrainConfig, checkpoints, load_model, read_metrics, read_result, train
from spheret.training.checkpoint import load_checkpoint, save_checkpoint
from spheret.training.state import TrainState, initial_state
from spheret.training.step import update_parameters

Tiny = Callable[..., TrainConfig]
Interrupted = Callable[[TrainConfig, Path, Dataset, int], None]
CPU = torch.device("cpu")
TIMED = ("tokens_per_s", "elapsed_s")


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMED} for line in read_metrics(folder)]


@pytest.mark.parametrize("scheme", list_schemes())
def test_twenty_steps_are_ten_and_ten(
    scheme: str, tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
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


def test_other_data_is_refused(tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    with pytest.raises(ValueError, match="fingerprint"):
        train(config, tmp_path, dataset=replace(dataset, fingerprint="other"), resume=True)


def test_only_the_newest_checkpoints_are_kept(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    def kept(keep: int) -> list[str]:
        out = tmp_path / str(keep)
        train(tiny(checkpoint_interval=2, keep_checkpoints=keep), out, dataset=dataset)
        assert sorted(os.listdir(out / "checkpoints")) == [path.name for path in checkpoints(out)]
        return [path.name for path in checkpoints(out)]

    assert kept(2) == ["step_0000004", "step_0000006"]
    assert kept(0) == ["step_0000002", "step_0000004", "step_0000006"]


def test_leftovers_of_a_killed_save_are_passed_over_and_swept(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
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


def violation(scheme: str, weights: dict[str, Tensor]) -> float:
    """Largest distance of a row (of nGPT's last maps: a column) from what the scheme promises of its norm."""
    worst = 0.0
    for name, weight in weights.items():
        if weight.dim() == 2:
            norms = weight.square().sum(0 if scheme == "ngpt" and "c_proj" in name else 1).sqrt()
            worst = max(worst, ((norms - 1).abs() if scheme == "ngpt" else norms - 1).max().item())
    return worst


@pytest.mark.parametrize("scheme", ["ngpt", "angpt"])
def test_the_constraint_holds_in_every_checkpoint(
    scheme: str, tiny: Callable[..., TrainConfig], dataset: Dataset, tmp_path: Path
) -> None:
    config = tiny(scheme=scheme, lr=0.05, weight_decay=0.0, warmup_ratio=0.0, checkpoint_interval=2, keep_checkpoints=0)
    result = train(config, tmp_path / "run", dataset=dataset)
    assert result.val_loss is not None
    saved = checkpoints(tmp_path / "run")
    assert len(saved) == 3
    for folder in saved:
        assert violation(scheme, safetensors.torch.load_file(folder / "model.safetensors")) < 1e-5
    model = load_model(tmp_path / "run")
    assert violation(scheme, dict(model.named_parameters())) < 1e-5
    torch.manual_seed(config.seed)
    start = type(model)(config.model)
    assert (start.wte.weight - model.wte.weight).abs().max() > 0.05  # there was something to hold


def bare_state_dict(folder: Path) -> None:
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "state.pt")


def without(part: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        saved = torch.load(folder / "state.pt", weights_only=True)
        del saved[part]
        torch.save(saved, folder / "state.pt")

    return remove


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def other_optimizer(folder: Path) -> None:
    saved = torch.load(folder / "state.pt", weights_only=True)
    saved["optimizer"]["param_groups"] = saved["optimizer"]["param_groups"][:1]
    torch.save(saved, folder / "state.pt")


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: os.remove(folder / "state.pt"), r"state\.pt is missing"),
    (lambda folder: os.remove(folder / "model.safetensors"), r"model\.safetensors is missing"),
    (without("optimizer"), r"state\.pt lacks optimizer"),
    (without("rng"), r"state\.pt lacks rng"),
    (without("format"), r"state\.pt lacks format"),
    (bare_state_dict, r"state\.pt lacks format, fingerprint, optimizer, monitor, counters, rng"),
    (lambda folder: torch.save([1, 2], folder / "state.pt"), r"state\.pt holds a list"),
    (other_optimizer, r"state\.pt does not fit the run"),
    (cut("state.pt", 3000), r"state\.pt cannot be read; was it cut short"),
    (cut("state.pt", 0), r"state\.pt cannot be read; was it cut short"),
    (cut("model.safetensors", 3000), r"model\.safetensors cannot be read; was it cut short"),
    (cut("model.safetensors", 0), r"model\.safetensors cannot be read; was it cut short"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_checkpoint_is_named_and_the_older_one_continues(
    damage: Callable[[Path], None], named: str, tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    config = tiny(steps=9, checkpoint_interval=2, keep_checkpoints=2)
    train(config, tmp_path / "straight", dataset=dataset)
    interrupted(config, tmp_path / "run", dataset, 7)
    older, newest = checkpoints(tmp_path / "run")
    damage(newest)
    resumed: list[Path] = []
    with pytest.warns(UserWarning, match=rf"{newest.name}/{named}.*now damaged_{newest.name}.*from {older.name}"):
        train(config, tmp_path / "run", dataset=dataset, resume=True, on_resume=resumed.append)
    assert resumed == [older]
    assert untimed(tmp_path / "run") == untimed(tmp_path / "straight")
    assert (tmp_path / "run" / "checkpoints" / f"damaged_{newest.name}").is_dir(), "nothing is deleted"
    assert load_model(tmp_path / "run").config == config.model


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=range(len(DAMAGE)))
def test_without_a_whole_checkpoint_one_error_lists_what_is_missing_and_the_ways_on(
    damage: Callable[[Path], None], named: str, tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 5)
    for folder in checkpoints(tmp_path):
        damage(folder)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".train.lock"}
    with pytest.raises(DamagedCheckpoint, match=named) as caught:
        train(config, tmp_path, dataset=dataset, resume=True)
    message = str(caught.value)
    assert "\n" not in message and "No older checkpoint is whole" in message and "--init-from" in message
    assert all(str(folder) in message for folder in checkpoints(tmp_path))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".train.lock"}
    assert after == before, "a refused resume changes nothing"


def test_two_faults_of_a_checkpoint_are_listed_together(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    folder = save_checkpoint(tmp_path, trained_state(config, 1), config, "data")
    for file in ("state.pt", "model.safetensors"):
        (folder / file).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"state\.pt is missing; .*model\.safetensors is missing"):
        load_checkpoint(folder, initial_state(config, CPU), "data")


def test_load_model_names_a_file_that_is_cut_short(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    train(tiny(), tmp_path, dataset=dataset)
    cut("model.safetensors", 3000)(checkpoints(tmp_path)[-1])
    with pytest.raises(DamagedCheckpoint, match=r"step_0000006/model\.safetensors cannot be read"):
        load_model(tmp_path)


def test_a_run_can_start_from_the_weights_of_another(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    first = train(tiny(steps=20, lr=0.01), tmp_path / "first", dataset=dataset)
    (checkpoints(tmp_path / "first")[-1] / "state.pt").unlink()  # the weights are enough
    config = tiny(steps=2, lr=1e-9, init_from=str(tmp_path / "first"))
    second = train(config, tmp_path / "second", dataset=dataset)
    assert second.val_loss == pytest.approx(first.val_loss, rel=1e-5) and second.step == 2
    other = replace(config, model=replace(config.model, n_embd=16))
    with pytest.raises(ValueError, match="does not fit the model"):
        train(other, tmp_path / "third", dataset=dataset)
    assert not (tmp_path / "third" / "config.json").exists()
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        train(replace(config, init_from=str(tmp_path)), tmp_path / "third", dataset=dataset)
