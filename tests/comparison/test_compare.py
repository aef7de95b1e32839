"""What a comparison trains, what it reports, and what it does with what earlier calls left in its folder."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from spheret.comparison.compare import Comparison, compare, failures, warnings_of
from spheret.comparison.reach import rates_that_train
from spheret.comparison.runs import TUNING_SEED, CompareConfig
from spheret.comparison.worker import LOCK_FILE, WARNINGS_FILE, warnings_kept
from spheret.training import checkpoints
from spheret.training.run_folder import read_metrics

Results = dict[str, Any]
BROKEN = "pre-ln:gain=1e38"
"""Diverges in its first step at every learning rate."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CompareConfig:
    corpus = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (corpus / f"{i}.txt").write_text(f"the norm of sphere {i} turns by an angle beta over p " * 10)
    return CompareConfig(
        data=(str(corpus),), schemes=("pre-ln", "proj"), lrs=(1e-3, 1e-2), seeds=2, steps=5, n_layer=1, n_head=2,
        n_embd=16, block_size=16, batch_size=2, eval_windows=4, device="cpu", out=tmp_path_factory.mktemp("out") / "a",
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def surroundings(new_cache: Callable[[], Path]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPHERET_CACHE", str(new_cache()))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def first(config: CompareConfig) -> Results:
    """The comparison as it comes out the first time."""
    return compare(config)


def run_jsons(config: CompareConfig) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in (config.out / "runs").glob("*/run.json")}


def losses(results: Results) -> list[float]:
    return [run["val_loss"] for entry in results["schemes"] for run in (*entry["tuning"], *entry["runs"])]


def test_the_rate_is_picked_on_a_seed_that_is_not_reported(first: Results, config: CompareConfig) -> None:
    assert first["settings"]["tuning_seed"] == TUNING_SEED and TUNING_SEED not in first["settings"]["seeds"]
    for entry in first["schemes"]:
        assert [t["lr"] for t in entry["tuning"]] == [1e-3, 1e-2] and {t["seed"] for t in entry["tuning"]} == {
            TUNING_SEED
        }
        assert entry["lr"] == min(entry["tuning"], key=lambda t: t["val_loss"])["lr"]
        assert [(r["seed"], r["lr"]) for r in entry["runs"]] == [(1, entry["lr"]), (2, entry["lr"])]
        assert entry["trains"] == asdict(rates_that_train(entry)) and entry["to_baseline"] is None, "evaluated once"  # type: ignore[arg-type]
        assert entry["lr_at_edge"] is True  # two rates have nothing but edges
        assert entry["val_loss"]["mean"] == pytest.approx(sum(r["val_loss"] for r in entry["runs"]) / 2)


def test_results_say_what_the_run_folders_say(first: Results, config: CompareConfig) -> None:
    assert json.loads((config.out / "results.json").read_text()) == first
    runs = [run for entry in first["schemes"] for run in (*entry["tuning"], *entry["runs"])]
    assert len({run["run"] for run in runs}) == 8 == len(run_jsons(config))
    assert "tokens_per_s" not in json.dumps(first), "runs share the machine: their speeds cannot be compared"
    for run in runs:
        own = json.loads((config.out / run["run"] / "run.json").read_text())
        trained = json.loads((config.out / run["run"] / "config.json").read_text())
        assert own["final"]["val_loss"] == run["val_loss"] and own["outcome"] == run["outcome"] == "finished"
        assert trained["lr"] == run["lr"] and trained["seed"] == run["seed"]


# A value of every setting that can change a result, other than the default.
OTHER: dict[str, Any] = {
    "data": ("other",), "tokenizer": "bpe:300", "vocab_multiple": 64, "text_column": "body", "val_fraction": 0.2,
    "n_layer": 2, "n_head": 1, "n_embd": 32, "block_size": 8, "dropout": 0.1, "init": "nanogpt", "positions": "rope",
    "mlp": "swiglu", "qk_norm": "rms", "head": "untied", "steps": 6, "batch_size": 3, "grad_accum": 2,
    "schedule": "constant", "warmup_steps": 2, "warmup_ratio": 0.5, "min_lr_ratio": 0.0, "decay_fraction": 0.5,
    "weight_decay": 0.3, "qkv_lr": 1e-4, "mlp_out_lr": 1e-4, "beta1": 0.8, "beta2": 0.99,
    "grad_clip": 2.0,
    "eval_windows": 5, "dtype": "bfloat16", "compile": "off", "lrs": (1e-3, 2e-3), "seeds": 3,
    "schemes": ("pre-ln", "cay"),
}  # fmt: skip
NO_EFFECT = {"eval_interval", "log_interval", "checkpoint_interval", "keep_checkpoints", "jobs", "out", "all_pairs"}
ELSEWHERE = {"device", "schemes", "sweep"}  # in the environment, in the entries, and on its own


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CompareConfig) if f.name not in NO_EFFECT])
def test_results_name_every_setting_that_can_change_them(name: str, config: CompareConfig) -> None:
    def settings(config: CompareConfig) -> Any:
        dataset: Any = SimpleNamespace(fingerprint="", tokenizer=SimpleNamespace(vocab_size=257))
        return Comparison(config, dataset)._settings()

    if name not in ELSEWHERE:
        base = dataclasses.replace(config, schedule="wsd") if name == "decay_fraction" else config
        before, after = settings(base), settings(dataclasses.replace(base, **{name: OTHER[name]}))
        assert after != before, f"{name} is not among the settings"
        json.dumps(after, allow_nan=False)


def test_each_scheme_records_the_settings_of_its_own(config: CompareConfig) -> None:
    own = dataclasses.replace(config, schemes=("pre-ln", "ngpt"), lrs=())
    state = Comparison(own, SimpleNamespace(fingerprint="", tokenizer=SimpleNamespace(vocab_size=257)))  # type: ignore[arg-type]
    pre_ln, ngpt = (state._entry(scheme) for scheme in own.names)
    assert all(pre_ln[key] != ngpt[key] for key in ("rates", "weight_decay"))


def test_a_second_call_trains_nothing(first: Results, config: CompareConfig) -> None:
    before = run_jsons(config)
    seen: list[Comparison] = []
    again = compare(config, on_tick=lambda state, runner: seen.append(state))
    assert run_jsons(config) == before
    assert again["schemes"] == first["schemes"] and len(seen[-1].reused) == seen[-1].total_runs == 8


def corrupt_result(folder: Path) -> None:
    (folder / "run.json").write_text('{"outcome": "finis')


def empty_config_and_no_result(folder: Path) -> None:
    (folder / "run.json").unlink()
    (folder / "config.json").write_text("")


def garbage_in_metrics(folder: Path) -> None:
    (folder / "run.json").write_text("[]")
    (folder / "metrics.jsonl").write_text("\0\0\0\n{]\n")


def broken_checkpoint_folder(folder: Path) -> None:
    (folder / "run.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "checkpoints" / "step_0000002").mkdir(parents=True)


@pytest.mark.parametrize(
    "damage", [corrupt_result, empty_config_and_no_result, garbage_in_metrics, broken_checkpoint_folder]
)
def test_what_a_crash_damaged_is_trained_again(
    damage: Callable[[Path], None], first: Results, config: CompareConfig
) -> None:
    compare(config)
    victim = config.out / first["schemes"][1]["runs"][0]["run"]
    before = run_jsons(config)
    damage(victim)
    (config.out / "results.json").write_text("{")
    again = compare(config)
    assert losses(again) == losses(first)
    assert {file.parent for file, changed in run_jsons(config).items() if changed != before[file]} == {victim}


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_truncated_checkpoint_does_not_stop_a_comparison(
    all_of_them: bool, config: CompareConfig, tmp_path: Path
) -> None:
    """It goes on from the older one or, where none is whole, runs again and keeps what was there."""
    small = dataclasses.replace(
        config, schemes=("proj",), lrs=(1e-2,), seeds=1, checkpoint_interval=2, out=tmp_path, eval_interval=1
    )
    first = compare(small)
    folder = tmp_path / first["schemes"][0]["runs"][0]["run"]
    (folder / "run.json").unlink()
    kept = checkpoints(folder)
    for checkpoint in kept if all_of_them else kept[-1:]:
        os.truncate(checkpoint / "model.safetensors", 100)
    again = compare(small)
    assert losses(again) == losses(first) and not failures(again)
    (warning,) = (w for w in warnings_of(again, tmp_path) if "cut short" in w)
    assert "starts over" in warning if all_of_them else f"continues from {kept[0].name}" in warning
    assert len(list(folder.rglob("model.safetensors"))) == (4 if all_of_them else 3)


@pytest.mark.parametrize("spelling", ["{}/", "{}/.", "{}/../{name}", "relative"])
def test_a_respelled_corpus_continues_every_run(
    spelling: str, config: CompareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Path(config.data[0])
    small = dataclasses.replace(config, schemes=("proj",), lrs=(1e-2,), seeds=1, checkpoint_interval=2, out=tmp_path)
    first = compare(small)
    folder = tmp_path / first["schemes"][0]["runs"][0]["run"]
    (folder / "run.json").unlink()
    last = checkpoints(folder)[-1]
    before = {file: file.stat().st_mtime_ns for file in last.iterdir()}
    monkeypatch.chdir(corpus.parent)
    name = corpus.name if spelling == "relative" else spelling.format(corpus, name=corpus.name)
    replaced: list[str] = []
    again = compare(dataclasses.replace(small, data=(name,)), on_replace=replaced.append)
    assert losses(again) == losses(first)
    assert {file: file.stat().st_mtime_ns for file in before} == before, "it was not trained again"
    assert replaced == [], "it is the same comparison"


def test_checkpoints_that_cannot_be_continued_are_kept(config: CompareConfig, tmp_path: Path) -> None:
    """Whatever made the run start over: a folder that holds weights is never emptied."""
    small = dataclasses.replace(config, schemes=("proj",), lrs=(1e-2,), seeds=1, checkpoint_interval=2, out=tmp_path)
    first = compare(small)
    folder = tmp_path / first["schemes"][0]["runs"][0]["run"]
    for number, damage in enumerate((empty_config_and_no_result, garbage_in_metrics), start=1):
        weights = {file.read_bytes() for file in folder.rglob("model.safetensors")}
        damage(folder)
        again = compare(small)
        assert losses(again) == losses(first)
        assert {file.read_bytes() for file in folder.rglob("model.safetensors")} >= weights
        assert len(list(folder.glob("earlier*"))) == number
        assert any("held checkpoints that the run cannot continue from" in w for w in warnings_of(again, tmp_path))


def test_other_settings_use_other_folders(first: Results, config: CompareConfig) -> None:
    before = run_jsons(config)
    other = compare(dataclasses.replace(config, steps=6, schemes=("proj",), lrs=(1e-2,), seeds=1))
    (run,) = other["schemes"][0]["runs"]
    assert config.out / run["run"] / "run.json" not in before
    assert run_jsons(config).items() >= before.items()
    assert losses(compare(config)) == losses(first)


def test_one_rate_needs_no_tuning_and_one_seed_gives_no_verdict(config: CompareConfig, tmp_path: Path) -> None:
    results = compare(dataclasses.replace(config, lrs=(1e-2,), seeds=1, out=tmp_path))
    assert results["verdict"].startswith("No verdict: with one seed")
    assert results["settings"]["tuning_seed"] is None
    for entry in results["schemes"]:
        assert entry["tuning"] == [] and entry["lr"] == 1e-2 and entry["lr_at_edge"] is False
        assert [r["seed"] for r in entry["runs"]] == [1]
    assert "not complete" not in results["verdict"]


def test_a_sweep_is_recorded_with_all_pairs_and_the_steps(config: CompareConfig, tmp_path: Path) -> None:
    small = dataclasses.replace(config, schemes=("ngpt",), sweep="p=0.5,1", lrs=(1e-2,), out=tmp_path, eval_interval=1)
    results = compare(dataclasses.replace(small, all_pairs=True))
    assert results["sweep"] == {
        "scheme": "spheret", "option": "p", "values": ["0.5", "1"], "names": ["spheret:p=0.5", "proj"],
    }  # fmt: skip
    base, *swept = results["schemes"]
    assert [entry["scheme"] for entry in swept] == results["sweep"]["names"]
    assert [(p["against"], p["scheme"]) for p in results["all_pairs"]] == [
        *(("ngpt", "spheret:p=0.5"), ("ngpt", "proj"), ("spheret:p=0.5", "proj")),
    ]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert base["flops_per_token"] > swept[0]["flops_per_token"] == swept[1]["flops_per_token"], "of its gated MLP"
    assert base["to_baseline"]["share"] <= 1 and base["to_baseline"]["flops_share"] <= 1
    for entry in swept:
        curves = [read_metrics(tmp_path / run["run"]) for run in entry["runs"]]
        means = [sum(r["val_loss"] for r in records) / 2 for records in zip(*curves, strict=True)]
        reached = [step for step, mean in enumerate(means, start=1) if mean <= base["val_loss"]["mean"]]
        found = entry["to_baseline"]
        assert (found["steps"] is None) == (not reached)
        if reached:
            assert max(1, reached[0] - 1) <= found["steps"] <= reached[0] and found["share"] == found["steps"] / 5
            assert found["flops_share"] < found["share"]
    replaced: list[str] = []
    assert "all_pairs" not in compare(small, on_replace=replaced.append), "only where asked"
    assert replaced == [], "it is the same comparison"


def test_a_scheme_that_always_diverges_is_named_and_not_averaged(config: CompareConfig, tmp_path: Path) -> None:
    results = compare(dataclasses.replace(config, schemes=("proj", BROKEN), out=tmp_path))
    fine, lost = results["schemes"]
    assert fine["val_loss"]["n"] == 2 and fine["diverged"] == 0
    assert lost["diverged"] == 2 and lost["val_loss"] == {
        "mean": None,
        "sd": None,
        "ci_low": None,
        "ci_high": None,
        "n": 0,
    }
    assert lost["lr"] == 1e-3 and [t["outcome"] for t in lost["tuning"]] == ["diverged"] * 2
    assert f"{lost['scheme']} diverged in 2 of 2 runs" in results["verdict"]
    assert not failures(results)


def test_a_relative_folder_holds_for_the_workers_too(config: CompareConfig, tmp_path: Path, monkeypatch: Any) -> None:
    small = dataclasses.replace(config, schemes=("proj",), lrs=(1e-2,), seeds=1, out=Path("here/out"))
    monkeypatch.chdir(tmp_path)
    results = compare(small)
    assert (tmp_path / "here/out" / results["schemes"][0]["runs"][0]["run"] / "run.json").exists()
    monkeypatch.chdir(tmp_path / "here")
    moved = dataclasses.replace(small, out=Path("out"))
    before = run_jsons(moved)
    assert losses(compare(moved)) == losses(results) and run_jsons(moved) == before


def test_a_run_waits_for_an_orphan_that_still_holds_its_folder(config: CompareConfig, tmp_path: Path) -> None:
    small = dataclasses.replace(config, schemes=("proj",), lrs=(1e-2,), seeds=1, out=tmp_path)
    folder = tmp_path / compare(small)["schemes"][0]["runs"][0]["run"]
    for name in ("run.json", "metrics.jsonl"):
        (folder / name).unlink()
    touched: list[bool] = []

    def hold(lock: FileLock) -> None:
        with lock:
            holding.set()
            time.sleep(2)
            touched.append((folder / "metrics.jsonl").exists())

    holding = threading.Event()
    orphan = threading.Thread(target=hold, args=(FileLock(folder / LOCK_FILE),))
    orphan.start()
    holding.wait()
    results = compare(small)
    orphan.join()
    assert touched == [False]
    assert results["schemes"][0]["runs"][0]["outcome"] == "finished"


def test_warnings_of_the_runs_are_kept_once_each_and_counted(first: Results, config: CompareConfig) -> None:
    for entry in first["schemes"]:
        with warnings_kept(config.out / entry["runs"][0]["run"]):
            for _ in range(3):
                warnings.warn("beware of\nthe loss", stacklevel=1)
    assert warnings_of(first, config.out) == {"beware of the loss": 2}


def test_warnings_are_kept_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), warnings_kept(tmp_path):
        warnings.warn("beware", stacklevel=1)
        raise RuntimeError
    assert (tmp_path / WARNINGS_FILE).read_text() == "beware\n"
