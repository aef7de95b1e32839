from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.comparison.statistics import summarise
from spheret.reporting import all_plots, load_comparison
from spheret.reporting.curves import run_plots
from spheret.reporting.plots import difference_limits, result_plots, robust_limits
from spheret.reporting.style import wrapped

finite = st.floats(min_value=0.1, max_value=50, allow_nan=False)


def test_one_bad_value_does_not_squeeze_the_others() -> None:
    good = [2.10, 2.11, 2.12, 2.13, 2.14]
    low, high = robust_limits([*good, 9.0])
    assert low < 2.10 and 2.14 < high < 2.4


def test_interval_ends_widen_the_limits_only_so_far() -> None:
    low, high = robust_limits([2.0, 2.1, 2.2], [1.0, 3.0])
    assert 1.8 < low < 1.95 and 2.25 < high < 2.4


@given(st.lists(finite, min_size=1, max_size=12), st.lists(finite, max_size=6))
def test_limits_always_hold_the_best_value_and_have_a_width(core: list[float], others: list[float]) -> None:
    low, high = robust_limits(core, others)
    assert low < min(core) < high


def test_no_values_at_all_still_give_limits() -> None:
    assert robust_limits([]) == (0.0, 1.0)


def test_differences_are_shown_whole_with_zero_in_sight() -> None:
    low, high = difference_limits([[-0.03, -0.06, 0.0], [-0.07, -0.15, 0.0], [-0.08, -0.16, 0.01]])
    assert low < -0.16 and high > 0.01
    low, high = difference_limits([[0.1], [0.2]])
    assert low < 0 and high > 0.2


def test_one_wild_difference_does_not_hide_the_others() -> None:
    low, high = difference_limits([[-0.03, -0.06, 0.0], [-0.07, -0.15, 0.0], [3.0, -20.0, 26.0]])
    assert -1 < low < -0.15 and 0 < high < 1


# --- what is drawn lies on the canvas ---

LONG = "spheret:p=0.5,alpha=0.3,decay=inv,count=sublayer,update-norm=rms,final-norm=none"
EVERY_OPTION = LONG + ",p-start=1,alpha-form=softplus,project=false,reproject=true,learn-radius=false,gain=0.125"
NAMES = {
    "long, and alike but for the middle or the end": [
        *("pre-ln", LONG, LONG.replace("sublayer", "block"), LONG.replace("=none", "=layernorm"), EVERY_OPTION),
    ],
    "no place to break": ["x" * 150, "x" * 149 + "$"],
    "many": ["spheret:p=learn-per-layer", *(f"spheret:p=0.{i},alpha=0.3,decay=none" for i in range(9))],
}


def texts(figure: Any) -> list[Any]:
    """All that is written in a figure, without the ticks beyond the ends of an axis, which are not drawn."""
    found = []
    for axes in figure.axes:
        found += [axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    found += [label for legend in figure.legends for label in legend.get_texts()]
    return [text for text in found if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_no_label_is_cut_and_no_axis_vanishes(names: list[str], make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    kinds = [kind(name, 1.4 + 0.01 * i, sphere=i > 0) for i, name in enumerate(names)]
    plots = all_plots(load_comparison(make_comparison(kinds, seeds=(1, 2))))
    assert len(plots) == 9
    for plot in plots[:5]:  # the others are drawn like the fifth
        figure = plot.figure
        figure.draw_without_rendering()
        canvas = figure.bbox.padded(1)
        for text in texts(figure):
            box = text.get_window_extent()
            inside = canvas.contains(box.x0, box.y0) and canvas.contains(box.x1, box.y1)
            assert inside, f"{plot.key}: {text.get_text()!r} at {box} leaves {canvas}"
        axes = figure.axes[0].get_window_extent()
        assert axes.width > 0.45 * figure.bbox.width and axes.height > 0.25 * figure.dpi, plot.key
        # Every scheme is named in full, apart from the others.
        labels = [x for legend in figure.legends for x in legend.get_texts()] or figure.axes[0].get_yticklabels()
        found = [label.get_text().replace("\n", "").replace("\\$", "$") for label in labels]
        assert found == (names[1:] if plot.key == "differences" else names)
        assert_apart(labels)


def assert_apart(labels: Sequence[Any]) -> None:
    for one, other in itertools.combinations(labels, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), f"{one} covers {other}"


@given(st.text(alphabet="abc:,= $", max_size=120), st.integers(min_value=1, max_value=40))
def test_wrapping_loses_nothing(text: str, width: int) -> None:
    lines = wrapped(text, width).replace("\\$", "$").split("\n")
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


# --- points beyond the axis ---


GOOD = [2.10, 2.11, 2.12]


@pytest.mark.parametrize(
    ("losses", "values"),
    [
        ({"a": GOOD, "b": [2.11, 2.12, 3.3151]}, ["mean 2.515", "seed 3.315"]),
        ({"a": GOOD, "b": [2.11, 2.12, 2.19]}, ["seed 2.19"]),
        ({"a": GOOD, "b": [2.1, 3.3, 3.4]}, ["mean 2.933", "seeds 3.3 to 3.4"]),
        ({"a": GOOD, "b": [3.31, 3.31, 3.31]}, ["mean 3.31", "seeds 3.31"]),
        ({"a": [2.11, 2.12, 33000.0], "b": GOOD}, ["mean 1.1e+04", "seed 3.3e+04"]),
        ({"a": GOOD, "b": [1.99, 2.12, 2.13]}, []),
        ({"a": [7.9, 8.0, 7.95], "collapsed, but lower": [7.7, 7.71, 7.72]}, []),
    ],
)
def test_every_seed_is_drawn_in_its_place_or_at_the_edge_with_its_value(
    losses: dict[str, list[float]], values: list[str]
) -> None:
    entries = [
        {"scheme": scheme, "lr": 0.01, "runs": [
            {"seed": i, "outcome": "finished", "val_loss": x, "collapsed": scheme.startswith("collapsed")}
            for i, x in enumerate(found)
        ]}
        for scheme, found in losses.items()
    ]  # fmt: skip
    (plot,) = [plot for plot in result_plots({"schemes": summarise(entries)}) if plot.key == "final_loss"]
    axes = plot.figure.axes[0]
    low, high = axes.get_xlim()
    points = [x for line in axes.lines if line.get_linestyle() == "None" for x in line.get_xdata()]
    for loss in itertools.chain(*losses.values()):
        assert low <= loss, "the best is never cut"
        assert min(loss, high) in points
    plot.figure.draw_without_rendering()
    beside = axes.texts
    assert [line for text in beside for line in text.get_text().split("\n")] == values
    for text in beside:
        box = text.get_window_extent()
        assert axes.get_window_extent().x1 < box.x0 and box.x1 <= plot.figure.bbox.x1


def test_one_evaluation_makes_no_curve(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    """A short comparison is evaluated at its end only: lines through one point cannot be seen."""
    folder = make_comparison([kind("pre-ln", 1.4), kind("cay", 1.41)])
    for metrics in folder.glob("runs/*/metrics.jsonl"):
        metrics.write_text(metrics.read_text().splitlines()[-1] + "\n")
    assert "loss_curves" not in [plot.key for plot in run_plots(load_comparison(folder))]


def test_a_logarithmic_axis_has_plain_and_separate_labels(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison([kind("pre-ln", 1.4), kind("cay", 1.41)])
    for i, file in enumerate(sorted(folder.glob("runs/*/diagnostics.json"))):
        values = json.loads(file.read_text())
        values["angle_deg"] = [3.0 * 1.4**k + i for k in range(12)]
        file.write_text(json.dumps(values))
    (plot,) = [plot for plot in run_plots(load_comparison(folder)) if plot.key == "angle_deg"]
    axes = plot.figure.axes[0]
    assert axes.get_yscale() == "log"
    plot.figure.draw_without_rendering()
    labels = [label for label in axes.yaxis.get_ticklabels(which="both") if label.get_text()]
    assert {"5", "10", "20", "50"} <= {label.get_text() for label in labels}
    assert_apart(labels)
