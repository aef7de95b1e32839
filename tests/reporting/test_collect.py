from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spheret.reporting import load_comparison, load_results, load_run
from spheret.training.run_folder import read_metrics


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_half_a_last_line_is_dropped_silently(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", '{"step": 1, "loss": 2.5}', '{"step": 2, "loss": 2.4}', '{"step": 3, "lo')
    assert [m["step"] for m in read_metrics(path.parent, skip_damaged=True)] == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", '{"step": 1}', '{"step": 2, "lo{"step": 2}', '{"step": 3}', "")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2"):
        assert [m["step"] for m in read_metrics(path.parent, skip_damaged=True)] == [1, 3]


def test_a_run_to_be_resumed_has_no_broken_line(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", '{"step": 1}', "{broken", '{"step": 3}', "")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a metrics record"):
        read_metrics(tmp_path)


def test_steps_repeated_after_a_resume_count_once_and_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl", '{"step": 1, "loss": 5}', '{"step": 2, "loss": 4}', '{"step": 3, "loss": 3}',
        '{"step": 2, "loss": 4.5}', '{"step": 3, "loss": 3.5}',
    )  # fmt: skip
    assert [(m["step"], m["loss"]) for m in read_metrics(path.parent, skip_damaged=True)] == [
        (1, 5),
        (2, 4.5),
        (3, 3.5),
    ]


def test_numbers_that_are_not_finite_become_none(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", '{"step": 1, "loss": NaN, "nested": [Infinity, 1.0]}')
    assert read_metrics(path.parent, skip_damaged=True) == [{"step": 1, "loss": None, "nested": [None, 1.0]}]


def test_a_comparison_comes_back_with_its_runs(make_comparison) -> None:  # type: ignore[no-untyped-def]
    comparison = load_comparison(make_comparison())
    assert len(comparison.runs) == 18 and comparison.missing == ()
    run = comparison.runs["runs/1-seed2"]
    assert run.config["seed"] == 2 and run.outcome["outcome"] == "finished" and len(run.metrics) == 41
    assert comparison.runs["runs/3-seed3"].diagnostics == {}


def test_a_missing_run_folder_is_an_error_that_names_it_unless_partial(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    shutil.rmtree(folder / "runs/1-seed2")
    with pytest.raises(FileNotFoundError, match=r"runs/1-seed2.*partial=True"):
        load_comparison(folder)
    partial = load_comparison(folder, partial=True)
    assert partial.missing == ("runs/1-seed2",) and len(partial.runs) == 17
    with pytest.raises(FileNotFoundError, match="1-seed2"):
        load_run(folder / "runs/1-seed2")


def test_a_folder_without_results_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="spheret compare"):
        load_results(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "sch', "not valid JSON"),
        ("[]", "holds a list"),
        (json.dumps({"format": 2, "schemes": []}), "format 2"),
    ],
)
def test_results_that_cannot_be_read_are_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "results.json", text)
    with pytest.raises(ValueError, match=rf"results\.json.*{message}"):
        load_results(tmp_path)
