"""The files of a run, and who may train into its folder."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spheret.data import Dataset
from spheret.training import (
    TrainConfig,
    checkpoints,
    config_from_dict,
    config_to_dict,
    load_model,
    read_metrics,
    read_result,
    train,
)
from spheret.training.run_folder import MetricsLog, check_same_config, read_json, write_bytes, write_json, write_text

Tiny = Callable[..., TrainConfig]
Interrupted = Callable[[TrainConfig, Path, Dataset, int], None]


@pytest.mark.parametrize("write", [write_json, lambda path, value: write_text(path, json.dumps(value))])
def test_a_file_that_cannot_be_written_stays_as_it_was(
    write: Callable[[Path, object], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write(path, {"step": 1})

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write(path, {"step": 2})
    assert read_json(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["run.json"], "nothing temporary is left"


def test_written_files_have_the_usual_permissions(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    write_bytes(tmp_path / "ours", b"x")
    (tmp_path / "plain").write_bytes(b"x")
    usual = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "ours").stat().st_mode == usual
    train(tiny(), tmp_path / "run", dataset=dataset)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {"model.safetensors", "state.pt", "run.json", "metrics.jsonl"} <= set(modes)
    assert {name for name, mode in modes.items() if mode != usual} == set()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"loss": math.nan, "nested": [math.inf, 1.0]})
    assert "NaN" not in path.read_text() and read_json(path) == {"loss": None, "nested": [None, 1.0]}
    path.write_text('{"loss": NaN, "nested": [-Infinity]}')
    assert read_json(path) == {"loss": None, "nested": [None]}


@pytest.mark.parametrize(
    ("text", "message"), [('{"outcome": "fin', "not valid JSON"), ("[1]", "holds a list, not a JSON object")]
)
def test_a_damaged_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=rf"run\.json.*{message}"):
        read_json(tmp_path / "run.json")


def test_a_missing_file_of_a_run_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run\.json in .*spheret train --out"):
        read_json(tmp_path / "run.json")


def test_records_come_in_order_of_step_and_the_later_one_counts(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 5}', '{"step": 3, "loss": NaN}', '{"step": 2, "loss": 4}', '{"step": 1, "loss": 6}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 6}, {"step": 2, "loss": 4}, {"step": 3, "loss": None}]
    assert read_metrics(tmp_path / "nowhere") == []


@pytest.mark.parametrize("damaged", ['{"step": 2, "lo{"step": 2}', "[]", '{"loss": 1}'])
def test_a_damaged_line_is_refused_or_omitted_with_a_warning(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + damaged + '\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2"):
        assert [record["step"] for record in read_metrics(tmp_path, skip_damaged=True)] == [1, 3]


def test_a_line_cut_short_by_a_kill_is_passed_over(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    train(tiny(), tmp_path, dataset=dataset)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_the_stored_result_is_the_returned_one(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    assert train(tiny(), tmp_path / "run", dataset=dataset) == read_result(tmp_path / "run")


def test_a_folder_with_a_run_is_not_overwritten(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    train(tiny(save_final=False, checkpoint_interval=0), tmp_path, dataset=dataset)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="resume=True"):
        train(tiny(seed=9), tmp_path, dataset=dataset)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.5}, r"lr=0\.0063 \(not 0\.5\)\. .*--init-from"),
        ({"steps": 40}, r"steps=6 \(not 40\); its warm-up is over"),
        ({"seed": 3, "beta1": 0.8}, r"beta1=0\.9 \(not 0\.8\), seed=1 \(not 3\)"),
    ],
)
def test_another_configuration_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, changes: dict[str, Any], named: str, interrupted: Interrupted
) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    with pytest.raises(ValueError, match=f"has {named}"):
        train(replace(config, **changes), tmp_path, dataset=dataset, resume=True)
    with pytest.raises(ValueError, match=r"has model\.n_layer=2 \(not 3\), model\.scheme=.*another folder"):
        model = replace(config.model, n_layer=3, scheme="geonorm")
        train(replace(config, model=model), tmp_path, dataset=dataset, resume=True)


def test_what_does_not_change_the_training_may_change(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    changed = replace(config, log_interval=3, eval_interval=1, checkpoint_interval=0, keep_checkpoints=0)
    assert train(changed, tmp_path, dataset=dataset, resume=True).outcome == "finished"


def test_another_spelling_of_the_same_scheme_resumes_the_run(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    interrupted(tiny(scheme="spheret:p=1,alpha=0.50", checkpoint_interval=2), tmp_path, dataset, 4)
    config = tiny(scheme="proj:alpha=0.5", checkpoint_interval=2)
    assert train(config, tmp_path, dataset=dataset, resume=True).outcome == "finished"


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
    tiny: Tiny, tmp_path: Path, dataset: Dataset, resume: bool, interrupted: Interrupted
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


def test_a_run_folder_from_before_the_rename_of_connection_can_be_read_and_resumed(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    """Its config.json, and that of its checkpoints, say `model.connection` where it is now `model.scheme`."""
    config = tiny(scheme="spheret:p=1", checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 5)
    for path in tmp_path.rglob("config.json"):
        values = read_json(path)
        values["model"]["connection"] = values["model"].pop("scheme")
        write_json(path, values)
    check_same_config(tmp_path, config)
    assert load_model(tmp_path).config == config.model
    with pytest.raises(ValueError, match=r"has model\.scheme='spheret:p=1' \(not 'pre-ln'\)"):
        check_same_config(tmp_path, replace(config, model=replace(config.model, scheme="pre-ln")))
    assert train(config, tmp_path, dataset=dataset, resume=True).outcome == "finished"
    assert "connection" not in read_json(tmp_path / "config.json")["model"]


def test_a_configuration_with_both_names_is_refused(tiny: Tiny) -> None:
    values = config_to_dict(tiny())
    values["model"]["connection"] = "geonorm"
    with pytest.raises(ValueError, match=r"unknown configuration keys model\.connection"):
        config_from_dict(values)


@pytest.mark.parametrize(("stop", "expected"), [(2, None), (4, 3), (5, 3)])
def test_a_validation_loss_goes_with_its_step(
    stop: int, expected: int | None, tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    interrupted(tiny(eval_interval=3), tmp_path, dataset, stop)
    final = read_json(tmp_path / "run.json")["final"]
    assert (final["step"], final["val_step"]) == (stop, expected)
    assert (final["val_loss"] is None) == (expected is None)
    assert read_result(tmp_path).val_step == expected
    assert train(tiny(eval_interval=3), tmp_path / "whole", dataset=dataset).val_step == 6


def respelled(folder: str) -> list[str]:
    """Other names of the same folder."""
    return [folder + "/", folder + "//.", os.path.relpath(folder), f"{folder}/../{os.path.basename(folder)}"]


def test_a_respelled_corpus_is_the_same_corpus(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    """What was read decides, by its fingerprint, for a stopped run and for a finished one."""
    config = tiny(checkpoint_interval=2)
    (corpus,) = config.data.data
    for number, name in enumerate(respelled(corpus)):
        out = tmp_path / str(number)
        interrupted(config, out, dataset, 5)
        other = replace(config, data=replace(config.data, data=(name,)))
        resumed: list[Path] = []
        assert train(other, out, resume=True, on_resume=resumed.append).outcome == "finished"
        assert [path.name for path in resumed] == ["step_0000004"]
        assert train(other, out, resume=True) == read_result(out)


def test_another_corpus_under_the_same_name_is_another_corpus(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(checkpoint_interval=2)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("one line of a text that is read\n" * 200)
    config = replace(config, data=replace(config.data, data=(str(corpus),)))
    train(config, tmp_path / "run")
    (corpus / "a.txt").write_text("another line of a text that is read\n" * 200)
    for ended in (True, False):
        if not ended:
            (tmp_path / "run" / "run.json").unlink()
        with pytest.raises(ValueError, match="was trained on data with fingerprint"):
            train(config, tmp_path / "run", resume=True)
    assert len(checkpoints(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json is not valid JSON.*every checkpoint holds a copy"),
        ("config.json", "[]", r"config\.json holds a list"),
        ("config.json", "[" * 10**5, r"config\.json is not valid JSON"),
        ("config.json", '{"steps": "many"}', r"config\.json: steps='many' is not of type int"),
        ("config.json", '{"model": 3}', r"config\.json: model=3 is not a JSON object"),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n{"step": 2}\n', r"metrics\.jsonl:2 is not a metrics record; remove"),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n{"step": 2}\n', r"metrics\.jsonl:1 is not a metrics record"),
        ("metrics.jsonl", '{"step": 1.5}\n{"step": 2}\n', r"metrics\.jsonl:1 is not"),
        ("metrics.jsonl", "[" * 10**5 + "\n{}\n", r"metrics\.jsonl:1 is not"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_written(
    name: str, content: str, message: str, tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    config = tiny(checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 4)
    (tmp_path / name).write_text(content)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message) as caught:
        train(config, tmp_path, dataset=dataset, resume=True)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", ["{", "[]", '{"outcome": "finished"}', '{"outcome": "finished", "final": 3}'])
def test_a_damaged_result_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json.*remove it, then continue the run with --resume"):
        read_result(tmp_path)


def test_more_steps_continue_a_constant_schedule(tiny: Tiny, tmp_path: Path, dataset: Dataset) -> None:
    short = tiny(schedule="constant", warmup_steps=2, steps=4)
    long = replace(short, steps=8)
    train(long, tmp_path / "straight", dataset=dataset)
    train(short, tmp_path / "two", dataset=dataset)
    result = train(long, tmp_path / "two", dataset=dataset, resume=True)
    assert (result.outcome, result.step) == ("finished", 8)
    straight, two = (load_model(tmp_path / name).state_dict() for name in ("straight", "two"))
    assert all(torch.equal(straight[name], value) for name, value in two.items())
    assert read_json(tmp_path / "two" / "config.json")["steps"] == 8
    with pytest.raises(ValueError, match="8 steps are done"):
        train(short, tmp_path / "two", dataset=dataset, resume=True)


def test_more_steps_continue_a_wsd_schedule_only_before_its_decay(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    config = tiny(schedule="wsd", decay_fraction=0.5, warmup_steps=1, checkpoint_interval=2)
    for step, refused in ((2, False), (6, True)):
        folder = tmp_path / str(step)
        interrupted(config, folder, dataset, step)
        if refused:
            with pytest.raises(ValueError, match="its wsd schedule already decays, from step 4 on"):
                train(replace(config, steps=12), folder, dataset=dataset, resume=True)
        else:
            assert train(replace(config, steps=12), folder, dataset=dataset, resume=True).step == 12


def test_more_steps_of_a_cosine_schedule_are_another_run(
    tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    config = tiny(warmup_steps=1, checkpoint_interval=2)
    interrupted(config, tmp_path, dataset, 5)
    with pytest.raises(ValueError, match="its cosine schedule sets every rate by the number of steps"):
        train(replace(config, steps=12), tmp_path, dataset=dataset, resume=True)


@pytest.mark.parametrize(
    ("limit", "named"),
    [(90_000, "cannot save .*step_0000004.*from step_0000002"), (700, r"cannot write .*config\.json")],
)
def test_a_full_disk_leaves_the_run_as_it_was(
    limit: int, named: str, tiny: Tiny, tmp_path: Path, dataset: Dataset, interrupted: Interrupted
) -> None:
    """In a process whose files may not grow beyond a limit, which fails as a full disk does."""
    config = tiny(checkpoint_interval=2, keep_checkpoints=1)
    interrupted(config, tmp_path, dataset, 3)
    code = (
        "import json, resource, signal, sys\n"
        "from spheret.training import config_from_dict, train\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))\n"
        "train(config_from_dict(json.loads(sys.argv[1])), sys.argv[2], resume=True)\n"
    )
    arguments = [json.dumps(config_to_dict(config)), str(tmp_path), str(limit)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and re.search(rf"OSError: .*{named}", last) and "make room" in last, done.stderr
    assert [path.name for path in checkpoints(tmp_path)] == ["step_0000002"]
    assert train(config, tmp_path, dataset=dataset, resume=True).outcome == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_metrics_that_cannot_be_written_say_so_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1})
        log._file.close()
        log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with pytest.raises(
            OSError, match=r"cannot write /dev/full \(No space left on device\): make room, then contin"
        ):
            log.write({"step": 2})
    assert read_metrics(tmp_path) == [{"step": 1}]
