"""The loss over a setting, and the side tables: the learning rates that train, the sweep of an option, all pairs."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spheret.comparison.reach import rates_that_train
from spheret.comparison.statistics import all_pairs
from spheret.reporting import load_results, pairs_markdown, print_side_tables
from spheret.reporting.report import render_html
from spheret.reporting.style import looks
from spheret.reporting.sweeps import option_places, sweep_plots

VALUES = {"0.05": "spheret:p=0.05", "2": "cay", "1": "proj", "inf": "spheret:p=inf", "learn": "spheret:p=learn"}
WORDS = ["auto", "learn", "learn-per-layer"]


@pytest.fixture
def swept(make_comparison: Any, kind: Any) -> Path:
    """A sweep over p in no order, in which one value has no finished run, one a collapsed one."""
    failures: dict[str, Any] = {"learn": {"diverged": (1, 2, 3)}, "0.05": {"collapsed": (2,)}}
    kinds = [kind("pre-ln", 1.42, lr=0.002, sphere=False)]
    kinds += [kind(name, 1.40 + 0.01 * i, **failures.get(value, {})) for i, (value, name) in enumerate(VALUES.items())]
    sweep = {"scheme": "spheret", "option": "p", "values": list(VALUES), "names": list(VALUES.values())}
    folder: Path = make_comparison(kinds, sweep=sweep)
    return folder


def plots(folder: Path) -> dict[str, Any]:
    return {plot.key: plot for plot in sweep_plots(load_results(folder))}


def printed(results: Any, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_side_tables(console, results)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# --- learning rates ---


def test_the_bars_are_the_ranges_that_train(make_comparison: Any) -> None:
    results = load_results(make_comparison())
    (plot,) = sweep_plots(results)
    above, strip = plot.figure.axes
    styles = looks([entry["scheme"] for entry in results["schemes"]])
    bars = {line.get_color(): list(line.get_xdata()) for line in strip.lines if len(line.get_xdata()) == 2}
    for entry in results["schemes"]:
        found = rates_that_train(entry)
        assert found is not None and bars.pop(styles[entry["scheme"]].color, None) == (
            None if found.low is None else [found.low, found.high]
        )
    assert not bars and above.get_xlim() == strip.get_xlim()
    assert {line.get_marker() for line in strip.lines} >= {"<", ">", "x"}, "open ends, and schemes that lost a seed"
    drawn = {x for line in above.lines for x in line.get_xdata()}
    assert drawn >= {t["lr"] for entry in results["schemes"] for t in entry["tuning"]}
    seeds = {
        run["val_loss"] for e in results["schemes"] for run in e["runs"] if run["val_loss"] and not run["collapsed"]
    }
    assert seeds <= {y for line in above.lines for y in line.get_ydata()}, "the reported runs too"
    assert "spheret:p=1 trains at 0.002 to 0.008 or more (at least 4x)." in plot.alt


def test_a_single_rate_is_no_sweep(make_comparison: Any) -> None:
    results = load_results(make_comparison())
    for entry in results["schemes"]:
        entry["tuning"] = []
    assert sweep_plots(results) == []


# --- the option of a sweep ---


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (["2", "0.5", "inf", "1"], ["0.5", "1", "2", "inf"]),
        (["learn", "inf", "-1", "0", "3"], ["-1", "0", "3", "inf", "learn"]),
        (["true", "false"], ["true", "false"]),
        (["5", *WORDS], ["5", *WORDS]),
        (["inf", "1"], ["1", "inf"]),
    ],
)
def test_values_lie_in_order_and_apart(values: list[str], order: list[str]) -> None:
    places = dict(zip(values, option_places(values), strict=True))
    xs = [places[value][0] for value in order]
    gaps = [b - a for a, b in itertools.pairwise(xs)]
    assert min(gaps) > 0.05 * (xs[-1] - xs[0])
    assert [v for v, (_, number) in places.items() if number] == [v for v in values if re.fullmatch(r"-?[\d.]+", v)]


def test_positive_numbers_lie_on_a_logarithmic_scale() -> None:
    (a, _), (b, _), (c, _) = option_places(["0.1", "1", "10"])
    assert b - a == pytest.approx(c - b)
    (a, _), (b, _), (c, _) = option_places(["0", "1", "2"])
    assert b - a == pytest.approx(c - b)


def test_loss_over_the_option_shows_each_value_with_its_interval(swept: Path) -> None:
    results, plot = load_results(swept), plots(swept)["sweep"]
    axes, by_name = plot.figure.axes[0], {entry["scheme"]: entry for entry in results["schemes"]}
    plot.figure.draw_without_rendering()
    labels = axes.get_xticklabels()
    assert sorted(label.get_text() for label in labels) == sorted(VALUES)
    for one, other in itertools.combinations(labels, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent())
    places = {label.get_text(): label.get_position()[0] for label in labels}
    bars = {line.get_xdata()[0]: list(line.get_ydata()) for line in axes.lines if len({*line.get_xdata()}) < 2}
    for value in ("1", "2", "inf"):
        estimate = by_name[VALUES[value]]["val_loss"]
        drawn = [list(x.get_ydata()) for x in axes.lines if set(x.get_xdata()) == {places[value]}]
        assert [estimate["ci_low"], estimate["ci_high"]] in drawn and [estimate["mean"]] in drawn
    assert places["learn"] in bars and "x" in {line.get_marker() for line in axes.lines}, "no run finished there"
    baseline = by_name["pre-ln"]["val_loss"]
    assert baseline["mean"] in {y for line in axes.lines for y in line.get_ydata()}
    band = axes.patches[0].get_extents() if axes.patches else None
    assert band is not None and band.height > 0
    assert "//" in [text.get_text() for text in axes.texts], "the axis is broken before infinity"


def test_results_without_a_sweep_have_no_figure_of_it(make_comparison: Any) -> None:
    folder = make_comparison()
    assert "sweep" not in plots(folder) and "Loss over" not in printed(load_results(folder))


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_shows_the_sweep_in_order(swept: Path, width: int) -> None:
    results = load_results(swept)
    text = printed(results, width)
    assert max(map(len, text.splitlines())) <= width
    lines = [line.split() for line in text.splitlines() if re.match(r" +\S+ +(\d\.\d+ ±|- )", line)]
    assert [words[0] for words in lines] == ["0.05", "1", "2", "inf", "learn"]
    for words, value in zip(lines, ["0.05", "1", "2", "inf"], strict=False):
        entry = next(e for e in results["schemes"] if e["scheme"] == VALUES[value])
        assert words[1] == f"{entry['val_loss']['mean']:.4f}"
    strips = [line[-36:] for line in text.splitlines() if re.match(r" +(\S+) +\d\.\d+ ±", line)]
    assert [re.sub("[ |-]", "", strip) for strip in strips] == [">", "o", "o", "o"], (
        "the collapsed one is off the scale"
    )
    assert sum("|" in strip for strip in strips) >= 3 and all("--" in strip for strip in strips)
    assert "All pairs" not in text


# --- all pairs ---


def test_all_pairs_only_where_asked(make_comparison: Any) -> None:
    results = load_results(make_comparison())
    assert printed(results) == "" == pairs_markdown(results)
    assert "All pairs" not in render_html(results, [])
    results["all_pairs"] = all_pairs(results["schemes"])
    page = render_html(results, [])
    text, pasted = printed(results, 120), pairs_markdown(results)
    assert len(results["all_pairs"]) == 15
    for pair in results["all_pairs"]:
        interval = f"[{pair['ci_low']:+.4f}, {pair['ci_high']:+.4f}]"
        assert interval in text and interval in pasted
        assert re.sub(r"-(?=\d)", "\N{MINUS SIGN}", interval).replace(", ", ",\N{NO-BREAK SPACE}") in page
    assert "[joint 95% interval]" in text
    assert "All 15 intervals" in " ".join(text.split()) and "All 15 intervals" in pasted
    assert len({line.count("|") for line in pasted.splitlines() if line.startswith("|")}) == 1
    assert max(map(len, printed(results, 80).splitlines())) <= 80
