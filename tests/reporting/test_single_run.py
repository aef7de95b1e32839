"""The report of one run, on a run that the trainer made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from builders import TINY, data_config

from spheret.cli.compare import ReportCommand, run_report
from spheret.models import GPTConfig
from spheret.reporting import is_run, load_run, outcome_lines, run_rows, write_run_report
from spheret.reporting.single_run import single_run_plots
from spheret.training import TrainConfig, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps with four evaluations, of a scheme whose exponents are learned."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    shape = {key: value for key, value in TINY.items() if key != "vocab_size"}
    config = TrainConfig(
        model=GPTConfig(**shape, vocab_size=257, scheme="spheret:p=learn-per-layer"),
        data=data_config(text),
        steps=12,
        eval_interval=3,
        eval_windows=4,
        log_interval=1,
        checkpoint_interval=0,
        save_final=False,
    )
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_every_quantity_of_a_connection_is_drawn_over_training_and_over_depth(run: Path) -> None:
    plots = {plot.key: plot for plot in single_run_plots(load_run(run))}
    over_training = {f"{key}_over_training" for key in ("angle_deg", "saturation", "alpha", "p", "skip_gain")}
    assert {"losses", "steps"} | over_training | {"angle_deg", "saturation", "alpha", "p", "skip_gain"} <= set(plots)
    measured = load_run(run).diagnostics["angle_deg"]
    assert f"spheret:p=learn-per-layer {sum(measured):.0f}." in plots["angle_deg"].caption
    assert "seed" not in plots["angle_deg"].caption + plots["p_over_training"].caption


def test_a_fixed_exponent_is_not_drawn_over_training(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if "connections" in record:
            record["connections"]["p"] = [0.5] * 4
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "p_over_training" not in {plot.key for plot in single_run_plots(load_run(run))}


def test_page_rows_and_figures_of_a_finished_run(run: Path, tmp_path: Path) -> None:
    final = load_run(run).outcome["final"]
    page = write_run_report(run, figures=tmp_path / "figures").read_text(encoding="utf-8")
    for words in (f"{final['val_loss']:.4f}", "Gradient norm and learning rate", "spheret train", "12 of 12", "torch"):
        assert words in page
    assert (tmp_path / "figures" / "saturation_over_training.png").stat().st_size > 1000
    rows = dict(run_rows(load_run(run)))
    assert rows["scheme"] == "spheret:p=learn-per-layer" and rows["tokens"] == f"{12 * 4 * 8:,}"


def test_a_run_that_has_not_ended_says_so(run: Path) -> None:
    (run / "run.json").unlink()
    (run / "diagnostics.json").unlink()
    page = write_run_report(run).read_text(encoding="utf-8")
    assert "The run has not ended: step 12 of 12." in page and "Loss during training" in page


def test_a_diverged_run_names_its_last_loss(run: Path) -> None:
    outcome = json.loads((run / "run.json").read_text())
    outcome |= {"outcome": "diverged", "reason": "the loss is NaN at step 9", "collapsed": False}
    outcome["final"] |= {"val_loss": None, "val_se": None, "last_loss": 3.25, "last_loss_step": 8}
    (run / "run.json").write_text(json.dumps(outcome))
    lines = outcome_lines(load_run(run))
    assert lines[0] == "The run diverged at step 12 of 12." and lines[1] == "the loss is NaN at step 9."
    assert "3.25" in lines[2]
    write_run_report(run)


def test_the_command_reports_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report(ReportCommand(run, markdown=True)) == 0
    assert "| scheme | spheret:p=learn-per-layer |" in capsys.readouterr().out
    assert run_report(ReportCommand(run)) == 0
    assert "finished with validation loss" in capsys.readouterr().out


def test_a_folder_that_is_neither_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no results\.json and no config\.json in .*`spheret train --out`"):
        is_run(tmp_path)
