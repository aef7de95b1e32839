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
from spheret.reporting.depth import LAYER_METRICS, over_depth
from spheret.reporting.single_run import alone, single_run_plots
from spheret.reporting.style import Plot, looks, styled
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
    measured = load_run(run).diagnostics
    turn, most = sum(measured["angle_deg"]), 90 * sum(measured["p"])
    assert f"spheret:p=learn-per-layer {turn:.0f} of at most {most:.0f}." in plots["angle_deg"].caption
    assert "seed" not in plots["angle_deg"].caption + plots["p_over_training"].caption


def over_depth_plot(run: Path, key: str) -> Plot:
    """One figure only, because drawing all of them takes seconds."""
    comparison = alone(load_run(run))
    (metric,) = [metric for metric in LAYER_METRICS if metric.key == key]
    with styled():
        plot = over_depth(comparison, metric, looks([entry["scheme"] for entry in comparison.results["schemes"]]))
    assert plot is not None
    return plot


def lines(run: Path, key: str) -> list[list[tuple[list[float], list[float]]]]:
    """Of each panel of a figure over depth, x and y of every line."""
    plot = over_depth_plot(run, key)
    return [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in plot.figure.axes]


def change(run: Path, **lists: list[float | None]) -> None:
    """Replace lists of the connections in every record of metrics.jsonl that has them."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if "connections" in record:
            record["connections"] |= lists
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_attention_and_mlp_have_a_panel_each_with_first_last_and_cap(run: Path) -> None:
    found = [m["connections"] for m in load_run(run).metrics if "connections" in m]
    first, last = found[0], found[-1]
    change(run, p=[0.1] * 4)
    for panel, start in zip(lines(run, "angle_deg"), (0, 1), strict=True):
        drawn = (first["angle_deg"][start::2], last["angle_deg"][start::2], [9.0, 9.0])
        assert panel == [([1.0, 2.0], pytest.approx(values)) for values in drawn]
    assert len(lines(run, "hidden_norm")) == 1


def test_caps_far_above_the_angles_are_named_or_leave_the_figure(run: Path) -> None:
    def angles() -> Plot:
        return over_depth_plot(run, "angle_deg")

    change(run, angle_deg=[1.0, 2.0, 2.0, 1.0], p=[1.0] * 4)
    plot = angles()
    assert (
        "above the figure, in degrees: spheret:p=learn-per-layer 90." in plot.caption and "Dotted" not in plot.caption
    )
    assert plot.figure.axes[0].get_ylim()[1] < 3
    for lowest, scale in ((2.0, "linear"), (0.1, "log")):
        change(run, angle_deg=[lowest, 2.0, None, lowest], p=[0.1, 0.1, 1.0, None])
        plot = angles()
        assert "Dotted" in plot.caption and plot.figure.axes[0].get_yscale() == scale
        assert [axes.get_ylim()[1] for axes in plot.figure.axes] == [12, 12]


def test_a_fixed_exponent_is_not_drawn_over_training(run: Path) -> None:
    change(run, p=[0.5] * 4)
    assert "p_over_training" not in {plot.key for plot in single_run_plots(load_run(run))}


def test_page_rows_and_figures_of_a_finished_run(run: Path, tmp_path: Path) -> None:
    final = load_run(run).outcome["final"]
    page = write_run_report(run, figures=tmp_path / "figures").read_text(encoding="utf-8")
    for words in (f"{final['val_loss']:.4f}", "Gradient norm and learning rate", "spheret train", "12 of 12", "torch"):
        assert words in page
    assert (tmp_path / "figures" / "saturation_over_training.png").stat().st_size > 1000
    rows = dict(run_rows(load_run(run)))
    assert rows["validation loss"] == f"{final['val_loss']:.4f} ± {final['val_se']:.4f} nats/token"
    assert rows["events"] == "none" and rows["lowest validation loss"].endswith("at step 12")
    assert rows["scheme"] == "spheret:p=learn-per-layer" and rows["tokens"] == f"{12 * 4 * 8:,}"


def test_a_run_that_has_not_ended_says_so(run: Path) -> None:
    (run / "run.json").unlink()
    (run / "diagnostics.json").unlink()
    page = write_run_report(run).read_text(encoding="utf-8")
    assert "The run has not ended: step 12 of 12." in page and "Loss during training" in page
    assert "Rotation by each sublayer" in page, "metrics.jsonl has it too"


def test_a_run_that_has_not_ended_has_the_loss_of_its_last_evaluation_and_its_events(run: Path) -> None:
    records = load_run(run).metrics[:8]
    (run / "run.json").unlink()
    records[3] |= {"event": "spike"}
    records[7] |= {"event": "spike", "skipped": 1}
    for record, loss in zip((r for r in records if "val_loss" in r), (2.5, 2.75), strict=True):
        record |= {"val_loss": loss, "val_se": 0.0125}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = dict(run_rows(load_run(run)))
    assert rows["validation loss"] == "2.7500 ± 0.0125 nats/token at step 6"
    assert rows["lowest validation loss"] == "2.5000 nats/token at step 3"
    assert rows["events"] == "2 loss spikes (steps 4, 8); 1 step skipped for gradients that were not finite"


def test_a_diverged_run_names_its_last_loss(run: Path) -> None:
    outcome = json.loads((run / "run.json").read_text())
    outcome |= {"outcome": "diverged", "reason": "the loss is NaN at step 9", "collapsed": False}
    outcome["final"] |= {"val_loss": None, "val_se": None, "last_loss": 3.25, "last_loss_step": 8}
    (run / "run.json").write_text(json.dumps(outcome))
    lines = outcome_lines(load_run(run))
    assert lines[0] == "The run diverged at step 12 of 12." and lines[1] == "the loss is NaN at step 9."
    assert "3.25" in lines[2]
    (run / "run.json").write_text(json.dumps(outcome | {"outcome": "interrupted", "reason": "SIGTERM"}))
    assert outcome_lines(load_run(run))[0] == "The run was interrupted at step 12 of 12."
    write_run_report(run)


def test_the_command_reports_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report(ReportCommand(run, markdown=True)) == 0
    assert "| scheme | spheret:p=learn-per-layer |" in capsys.readouterr().out
    assert run_report(ReportCommand(run)) == 0
    assert "finished with validation loss" in capsys.readouterr().out


def test_a_folder_that_is_neither_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no results\.json and no config\.json in .*`spheret train --out`"):
        is_run(tmp_path)
