from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spheret.data import DataConfig, Dataset, prepare
from spheret.data.shards import HEADER_BYTES
from spheret.evaluation import evaluate
from spheret.training import TrainConfig, load_model, read_metrics, read_result, train
from spheret.training.loop import Run

Tiny = Callable[..., TrainConfig]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder).state_dict()


def read(folder: Path, name: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{name} holds {constant}, which is no JSON")

    return json.loads((folder / name).read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, dataset: Dataset) -> tuple[TrainConfig, Path]:
    """One run that learns something."""
    out = tmp_path_factory.mktemp("finished")
    config = tiny("spheret:p=1", steps=60, batch_size=8, eval_windows=16, eval_interval=20, log_interval=7, lr=0.01)
    train(config, out, dataset=dataset)
    return config, out


def test_a_run_learns_and_its_folder_tells_the_story(finished: tuple[TrainConfig, Path], dataset: Dataset) -> None:
    config, out = finished
    run, lines = read(out, "run.json"), read_metrics(out)
    assert (run["outcome"], run["reason"], run["collapsed"]) == ("finished", None, False)
    assert run["final"]["step"] == 60
    assert run["final"]["tokens"] == 60 * 8 * 32
    assert run["final"]["val_loss"] < 0.8 * run["unigram_loss"]
    assert run["final"]["val_loss"] == lines[-1]["val_loss"]
    assert run["final"]["val_bpb"] == pytest.approx(run["final"]["val_loss"] / math.log(2), rel=0.02)
    assert run["parameters"] == sum(p.numel() for p in load_model(out).parameters())
    assert run["tokens_per_s"] > 0 and "not comparable between runs" in run["tokens_per_s_note"]
    assert run["versions"]["torch"] == torch.__version__
    assert run["machine"]["device"] == "cpu" and run["machine"]["cores"] >= 1
    assert run["data"]["fingerprint"] == dataset.fingerprint
    assert run["data"]["train_tokens"] == len(dataset.train)
    assert [line["step"] for line in lines] == [1, 7, 14, 20, 21, 28, 35, 40, 42, 49, 56, 60]
    assert [line["step"] for line in lines if "val_loss" in line] == [20, 40, 60]
    assert [line["lr"] for line in lines] == [config.lr_at(line["step"] - 1) for line in lines]
    followed = [line["connections"] for line in lines if "val_loss" in line]
    assert all(list(c) == ["alpha", "p", "angle_deg", "saturation", "skip_gain"] for c in followed)
    assert all(len(values) == 2 * config.model.n_layer for c in followed for values in c.values())
    assert followed[0]["alpha"] != followed[-1]["alpha"] and "connections" not in lines[0]
    assert followed[-1]["angle_deg"] == read(out, "diagnostics.json")["angle_deg"]
    assert {"tokens", "loss", "grad_norm", "tokens_per_s", "elapsed_s"} <= set(lines[0])


def test_each_evaluation_measures_the_connections_once(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation serves diagnostics.json too: measuring twice would cost more than 1% of a short run."""
    measured, probe = [], Run.probe
    monkeypatch.setattr(Run, "probe", lambda run, state: measured.append(state.step) or probe(run, state))
    train(tiny("spheret:p=1", steps=5, eval_interval=2), tmp_path / "run", dataset=dataset)
    assert measured == [2, 4, 5]


def test_the_initial_loss_is_near_that_of_a_uniform_guess(finished: tuple[TrainConfig, Path]) -> None:
    assert read_metrics(finished[1])[0]["loss"] == pytest.approx(math.log(257), rel=0.25)


def test_diagnostics_have_one_entry_a_sublayer(finished: tuple[TrainConfig, Path]) -> None:
    measured = read(finished[1], "diagnostics.json")
    assert measured["layer"] == [1, 1, 2, 2]
    assert measured["sublayer"] == ["attn", "mlp", "attn", "mlp"]
    assert all(len(values) == 4 for values in measured.values())
    assert all(0 < angle < 180 for angle in measured["angle_deg"])


def test_the_final_checkpoint_has_the_final_loss(finished: tuple[TrainConfig, Path], dataset: Dataset) -> None:
    config, out = finished
    windows = Run.build(config, out, dataset).validation
    result = evaluate(load_model(out), windows.x, windows.y, windows.token_bytes)
    assert result.loss == pytest.approx(read_result(out).val_loss, rel=1e-6)


@pytest.mark.parametrize("scheme", ["pre-ln", "spheret:p=learn"])
def test_the_same_configuration_gives_the_same_run(scheme: str, tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    config = tiny(scheme=scheme, dropout=0.1)
    torch.manual_seed(5)
    train(config, tmp_path / "a", dataset=dataset)
    torch.rand(3)  # what the caller draws must not matter
    train(replace(config, eval_interval=1), tmp_path / "b", dataset=dataset)
    train(replace(config, seed=2), tmp_path / "c", dataset=dataset)
    a, b, c = (final_weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["wte.weight"], c["wte.weight"])
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in "abc"]
    assert losses[0] == losses[1] != losses[2]


def test_the_callers_random_state_is_left_alone(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    before = torch.get_rng_state()
    train(tiny(dropout=0.1), tmp_path, dataset=dataset)
    assert torch.equal(torch.get_rng_state(), before)


def test_accumulation_trains_the_same_model(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    for accum in (1, 4):
        train(tiny(grad_accum=accum), tmp_path / str(accum), dataset=dataset)
    one, four = (read_metrics(tmp_path / str(accum)) for accum in (1, 4))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in four], rel=1e-4)
    assert [line["grad_norm"] for line in one] == pytest.approx([line["grad_norm"] for line in four], rel=1e-3)


def test_on_log_gets_every_line(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    heard: list[dict[str, Any]] = []
    on_disk: list[int] = []

    def listen(record: dict[str, Any]) -> None:
        heard.append(record)
        on_disk.append(len(read_metrics(tmp_path)))

    train(tiny(), tmp_path, dataset=dataset, on_log=listen)
    assert [record["step"] for record in heard] == [1, 2, 3, 4, 5, 6]
    assert on_disk == [1, 2, 3, 4, 5, 6], "each line is on disk when it is announced"


@pytest.mark.parametrize("on_divergence", ["stop", "continue"])
def test_a_run_with_an_absurd_learning_rate_diverges(
    on_divergence: str, tiny: Tiny, tmp_path: Path, dataset: Dataset
) -> None:
    config = tiny(
        lr=1e30,
        warmup_ratio=0,
        grad_clip=0,
        steps=20,
        schedule="constant",
        on_divergence=on_divergence,
        save_final=False,
    )
    result = train(config, tmp_path, dataset=dataset)
    assert result.outcome == "diverged"
    assert result.reason is not None and result.reason.startswith("step ")
    assert not result.collapsed
    run = read(tmp_path, "run.json")
    assert (run["outcome"], run["reason"]) == ("diverged", result.reason)
    assert run["final"]["val_loss"] is None or run["final"]["val_loss"] > 100
    lines = read_metrics(tmp_path)
    assert any("event" in line for line in lines)
    assert (lines[-1]["step"] == 20) == (on_divergence == "continue")


@pytest.mark.parametrize("log_interval", [1, 7])
def test_the_last_finite_loss_of_a_diverged_run_is_recorded(
    log_interval: int, tiny: Tiny, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its step has no line in metrics.jsonl."""
    original, losses = Run.gradients, []

    def break_at_step_six(self: Run, forward: Any, step: int) -> torch.Tensor:
        loss = original(self, forward, step)
        losses.append(loss.item() if step < 5 else math.nan)
        return loss if step < 5 else loss * math.nan

    monkeypatch.setattr(Run, "gradients", break_at_step_six)
    result = train(tiny(steps=20, log_interval=log_interval), tmp_path, dataset=dataset)
    assert result.outcome == "diverged"
    assert (result.last_loss, result.last_loss_step) == (losses[4], 5)
    final = read(tmp_path, "run.json")["final"]
    assert (final["last_loss"], final["last_loss_step"]) == (losses[4], 5)
    assert read_result(tmp_path) == result
    assert (
        result.explanation is not None and f"last finite training loss {losses[4]:.4f} at step 5" in result.explanation
    )


def test_max_train_tokens_ends_the_run(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    result = train(tiny(max_train_tokens=400), tmp_path, dataset=dataset)
    assert (result.step, result.tokens) == (3, 3 * 128)


def test_prepares_the_data_itself(tiny: Tiny, tmp_path: Path) -> None:
    assert train(tiny(steps=2), tmp_path / "run").outcome == "finished"


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, dataset: Dataset
) -> None:
    config = tiny()
    small = replace(config, model=replace(config.model, vocab_size=200))
    with pytest.raises(ValueError, match=r"vocab_size=200 .* use 257 or more"):
        train(small, tmp_path / "run", dataset=dataset)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("side", "place"), [("train", slice(None)), ("val", slice(None)), ("train", 77), ("val", 0)])
def test_ids_that_do_not_fit_are_refused_before_anything_is_written(
    side: str, place: slice | int, tiny: Tiny, tmp_path: Path, dataset: Dataset
) -> None:
    """The header says one vocabulary, the ids are of another; also where a single one is, and never a target."""
    shard = getattr(dataset, side)
    ids = np.array(shard.tokens)
    ids[place] = 299
    (tmp_path / "bad.shard").write_bytes(shard.path.read_bytes()[:HEADER_BYTES] + ids.tobytes())
    bad = replace(dataset, **{side: replace(shard, path=tmp_path / "bad.shard")})
    with pytest.raises(ValueError, match=r"299\b.*vocabulary (of|has) 257"):
        train(tiny(), tmp_path / "run", dataset=bad)
    assert not (tmp_path / "run").exists()


def test_works_without_a_cuda_driver(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    for name in ("is_bf16_supported", "current_device", "get_device_name", "get_device_capability", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, name, no_driver)
    for name in ("device_count", "synchronize", "set_rng_state", "empty_cache", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, no_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cpu"):
        assert train(tiny(steps=2, device=device), tmp_path / device, dataset=dataset).outcome == "finished"
    with pytest.raises(ValueError, match="finds no cuda here; use auto or cpu"):
        train(tiny(device="cuda"), tmp_path / "cuda", dataset=dataset)


def test_bfloat16_keeps_parameters_in_float32_and_moves_the_scalars(
    tiny: Tiny, tmp_path: Path, dataset: Dataset
) -> None:
    config = tiny(scheme="spheret:p=learn", dtype="bfloat16", steps=8, lr=1e-3)
    result = train(config, tmp_path / "low", dataset=dataset)
    full = train(replace(config, dtype="float32"), tmp_path / "full", dataset=dataset)
    assert result.val_loss == pytest.approx(full.val_loss, rel=0.02)
    assert result.val_loss != full.val_loss
    weights = final_weights(tmp_path / "low")
    start = train(replace(config, steps=1, lr=1e-12), tmp_path / "start", dataset=dataset).folder
    scalars = [name for name, value in weights.items() if value.numel() == 1 and "conn" in name]
    assert any(not torch.equal(weights[name], final_weights(start)[name]) for name in scalars)
    assert all(value.dtype == torch.float32 for value in weights.values() if value.is_floating_point())


def test_validation_windows_do_not_overlap_on_a_short_text(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    """Tokens that are counted twice would make the standard error look smaller than it is."""
    config = tiny(eval_windows=10_000)
    windows = Run.build(config, tmp_path, dataset).validation.y
    assert 1 < len(windows) < 10_000
    assert windows.size <= len(dataset.val) < windows.size + config.model.block_size + 1


def test_the_validation_windows_are_the_same_for_every_seed(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    a, b = (Run.build(tiny(seed=seed), tmp_path, dataset).validation for seed in (1, 2))
    assert np.array_equal(a.y, b.y)
    assert a.unigram_loss == b.unigram_loss


def test_prepared_data_settles_the_configuration(tiny: Tiny, data_config: DataConfig, tmp_path: Path) -> None:
    """config.json names the tokenizer that made the tokens, whatever the default is."""
    prepare(replace(data_config, tokenizer="bpe:258", val_fraction=0.2), out=tmp_path / "shards")
    config = tiny(steps=1, data=DataConfig(data=(str(tmp_path / "shards"),)))
    config = replace(config, model=replace(config.model, vocab_size=258))
    train(config, tmp_path / "run")
    stored = read(tmp_path / "run", "config.json")["data"]
    assert (stored["tokenizer"], stored["val_fraction"]) == ("bpe:258", 0.2)


NO_DEVICES = ("meta", "hpu", "gpu", "cuda:", "3", "")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "device = 'mps': PyTorch .* finds no mps here; use auto or cpu"),
        ("xpu:1", "finds no xpu here"),
        ("cpu:3", "device = 'cpu:3': the last one here is cpu:0"),
        ("cuda:3", "device = 'cuda:3': the last one here is cuda:1; use it, or auto"),
        *((name, f"device = '{name}' is not one that PyTorch trains on") for name in NO_DEVICES),
    ],
)
def test_a_device_that_is_not_here_costs_one_line_before_the_corpus_is_read(
    device: str, message: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = tiny(device=device)
    config = replace(config, data=replace(config.data, data=("missing.txt",)))
    with pytest.raises(ValueError, match=message) as caught:
        train(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "device", "says"), [("auto", "cuda", True), ("bfloat16", "cuda", False), ("auto", "cpu", False)]
)
def test_a_gpu_without_bfloat16_is_said_to_compute_in_float32(
    name: str, device: str, says: bool, tiny: Tiny, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr("spheret.training.loop.resolve_device", lambda name: torch.device(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run.build(tiny(device=device, dtype=name), tmp_path, dataset)
    assert sum("computes in float32" in str(warning.message) for warning in caught) == says


def test_a_folder_without_a_name_is_not_the_current_one(tiny: Tiny, dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="out = '' names no folder"):
        train(tiny(), "", dataset=dataset)
