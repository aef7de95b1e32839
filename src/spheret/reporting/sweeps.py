"""The figures of the loss over a setting, drawn from results.json alone: the learning rate, the option of `--sweep`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spheret.comparison.reach import TOLERANCE, rates_that_train
from spheret.comparison.statistics import has_finished
from spheret.comparison.verdict import range_words
from spheret.reporting.plots import Limits, robust_limits
from spheret.reporting.style import (
    BASELINE_COLOR,
    BELOW,
    PALETTE,
    Look,
    Plot,
    legend_below,
    looks,
    new_figure,
    render,
    styled,
    wrapped,
)

_STRIP = 0.13
"""Inches of a scheme's row in the strip of learning rates that train."""


def sweep_plots(results: Mapping[str, Any]) -> list[Plot]:
    """Loss over learning rate if several were tried, and loss over the option of a sweep if there was one."""
    with styled():
        drawn = [_learning_rates(results, looks([entry["scheme"] for entry in results["schemes"]])), _option(results)]
    return [plot for plot in drawn if plot is not None]


# --- learning rate ---


def _learning_rates(results: Mapping[str, Any], styles: Mapping[str, Look]) -> Plot | None:
    entries = results["schemes"]
    tried = sorted({t["lr"] for entry in entries for t in entry.get("tuning") or []})
    losses = [t["val_loss"] for e in entries for t in e.get("tuning") or [] if has_finished(t)]
    if len(tried) < 2 or not losses:
        return None
    low, high = robust_limits([*losses, *(loss for entry in entries for loss in _seeds(entry))], reach=5)
    ranges = {entry["scheme"]: rates_that_train(entry) for entry in entries}
    known = {scheme: found for scheme, found in ranges.items() if found is not None}
    figure, axes = new_figure(2.8, below=_STRIP * len(entries) + 0.5 if known else 0.0)
    handles = [(_rates_of(axes, entry, styles[entry["scheme"]], high), entry["scheme"]) for entry in entries]
    axes.set_xscale("log")
    axes.set_ylim(low, high)
    axes.set_ylabel("validation loss (nats/token)")
    if known:
        _strip(figure.axes[1], entries, styles, ranges)
    bottom = figure.axes[-1]
    _ticks(bottom, [math.log(rate) for rate in tried], tried, [f"{rate:g}" for rate in tried])
    bottom.set_xlabel("learning rate")
    legend_below(figure, handles)
    caption = (
        "Line: one run per learning rate, on the tuning seed. Ring: the rate chosen for the reported runs, which are "
        "the faint points. Cross on the upper edge: diverged or did not finish. Triangle: above the scale."
    )
    if known:
        caption += (
            f" Bars below: the neighbouring rates that end within {TOLERANCE:g} nats of the scheme's best, with no run "
            "diverged or collapsed. Arrow: the range may go on beyond the rates tried. Cross: no such rate."
        )
    chosen = "; ".join(f"{e['scheme']} {e['lr']:g}" for e in entries if e.get("lr") is not None)
    words = "".join(f" {scheme} trains at {range_words(found)}." for scheme, found in known.items())
    return render(
        figure,
        key="learning_rates",
        title="Loss over learning rate",
        caption=caption,
        alt=f"Validation loss against learning rate; chosen rates: {chosen}.{words}",
    )


def _seeds(entry: Mapping[str, Any]) -> list[float]:
    return [run["val_loss"] for run in entry["runs"] if has_finished(run)]


def _rates_of(axes: Any, entry: Mapping[str, Any], look: Look, high: float) -> Any:
    tuning = sorted(entry.get("tuning") or [], key=lambda t: float(t["lr"]))
    finished = [(t["lr"], t["val_loss"]) for t in tuning if has_finished(t)]
    (line,) = axes.plot(
        [lr for lr, _ in finished], [y for _, y in finished], color=look.color, linestyle=look.dash, marker=look.marker,
        ms=4.5,
    )  # fmt: skip
    if entry.get("lr") is not None:
        _faint(axes, entry["lr"], _seeds(entry), look, high)
    for lr, y in finished:
        if y > high:
            _at_edge(axes, lr, high, look, "^")
        if lr == entry.get("lr"):
            axes.plot([lr], [min(y, high)], "o", mfc="none", mec=look.color, ms=11, mew=1.4)
    for t in tuning:
        if not has_finished(t):
            _at_edge(axes, t["lr"], high, look, "x")
    return line


def _strip(
    axes: Any, entries: Sequence[Mapping[str, Any]], styles: Mapping[str, Look], ranges: Mapping[str, Any]
) -> None:
    """One bar per scheme, in the order of the legend: the learning rates at which it trains."""
    for row, entry in enumerate(entries):
        look, found = styles[entry["scheme"]], ranges[entry["scheme"]]
        if found is None:
            continue
        if found.low is None:
            best = entry.get("lr") or entry["tuning"][0]["lr"]
            axes.plot([best], [row], "x", color=look.color, markersize=5, markeredgewidth=1.6)
            continue
        axes.plot(
            [found.low, found.high], [row, row], color=look.color, linestyle=look.dash, linewidth=3.2,
            solid_capstyle="butt", dash_capstyle="butt",
        )  # fmt: skip
        # A caret at an end that is open, so that a range is not taken for narrower than it may be.
        carets = {found.low: "<" * found.open_low}
        carets[found.high] = ">" * found.open_high or carets.get(found.high, "")
        for rate, caret in carets.items():  # one, if the range is a single rate
            axes.plot([rate], [row], caret or look.marker, color=look.color, markersize=5)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_ylabel("trains")
    axes.grid(axis="y", visible=False)


# --- the option of a sweep ---


def _option(results: Mapping[str, Any]) -> Plot | None:
    sweep = results.get("sweep")
    by_name = {entry["scheme"]: entry for entry in results["schemes"]}
    if not sweep:
        return None
    points = [(v, by_name[name]) for v, name in zip(sweep["values"], sweep["names"], strict=True) if name in by_name]
    if len(points) < 2 or not any(_seeds(entry) for _, entry in points):
        return None
    baseline = results["schemes"][0]
    drawn = [*(entry for _, entry in points), baseline]
    sound = [entry for entry in drawn if not entry.get("collapsed")] or drawn  # collapsed runs would stretch the axis
    ends = [entry["val_loss"][key] for entry in sound for key in ("ci_low", "ci_high")]
    limits = robust_limits([x for e in sound for x in _seeds(e)], [x for x in ends if x is not None], widen=1)
    figure, axes = new_figure(3.0)
    look, places = Look(PALETTE[0], "o", "-"), option_places([value for value, _ in points])
    handles = [(_points(axes, points, places, look, limits), sweep["scheme"])]
    handles += _baseline_band(axes, baseline)
    xs = [x for x, _ in places]
    span = max(xs) - min(xs)
    axes.set_xlim(min(xs) - 0.06 * span, max(xs) + 0.06 * span)
    axes.set_ylim(*limits)
    _ticks(axes, xs, xs, [value for value, _ in points])
    _breaks(axes, points, places)
    axes.set_xlabel(wrapped(sweep["option"], BELOW))
    axes.set_ylabel("validation loss (nats/token)")
    legend_below(figure, handles)
    shown = "; ".join(
        f"{value} {entry['val_loss']['mean']:.4f}" if _seeds(entry) else f"{value} none" for value, entry in points
    )
    return render(
        figure,
        key="sweep",
        title=f"Loss over {sweep['option']}",
        caption="Points and bars: mean and 95% interval over seeds, each value at its own best learning rate. Faint: "
        f"single seeds. Grey line and band: mean of {baseline['scheme']} and its interval. Triangle on the upper edge: "
        "above the scale. Cross there: no run finished. Bars and band may go on beyond the scale.",
        alt=f"Mean final validation loss by {sweep['option']} of {sweep['scheme']}, nats per token: {shown}.",
    )


def option_places(values: Sequence[str]) -> list[tuple[float, bool]]:
    """Where each value of an option goes on the x axis, and whether it is a number there.

    Finite numbers come first, on a logarithmic scale if all of them are positive. Infinity follows after a gap, and
    then come words, in the order given.
    """
    numbers = {value: number for value in values if (number := _number(value)) is not None}
    finite = sorted(x for x in numbers.values() if math.isfinite(x))
    scale = math.log10 if finite and finite[0] > 0 else float
    ends = [scale(x) for x in finite[:1] + finite[-1:]] or [0.0, 0.0]
    step = max((ends[1] - ends[0]) / 6, 0.3 if scale is math.log10 else 0.0) or 1.0
    places, following = [], ends[1]
    outside = [v for v in values if v in numbers and math.isinf(numbers[v])] + [v for v in values if v not in numbers]
    after = {value: following + step * (i + bool(finite)) for i, value in enumerate(outside)}
    for value in values:
        places.append((after[value], False) if value in after else (scale(numbers[value]), True))
    return places


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _points(
    axes: Any,
    points: Sequence[tuple[str, Mapping[str, Any]]],
    places: Sequence[tuple[float, bool]],
    look: Look,
    limits: Limits,
) -> Any:
    low, high = limits
    line = None
    drawn = []
    for (_, entry), (x, is_number) in zip(points, places, strict=True):
        seeds, estimate = _seeds(entry), entry["val_loss"]
        if not seeds:
            _at_edge(axes, x, high, look, "x")
            continue
        _faint(axes, x, seeds, look, high)
        if estimate["ci_low"] is not None:
            ends = [min(max(estimate[key], low), high) for key in ("ci_low", "ci_high")]
            axes.plot([x, x], ends, color=look.color, linewidth=2.2, solid_capstyle="butt")
        if estimate["mean"] > high:
            _at_edge(axes, x, high, look, "^")
        else:
            (line,) = axes.plot([x], [estimate["mean"]], look.marker, color=look.color, ms=6, zorder=4)
        if is_number:
            drawn.append((x, estimate["mean"]))
    drawn.sort()
    (path,) = axes.plot([x for x, _ in drawn], [y for _, y in drawn], color=look.color, linestyle=look.dash, zorder=2)
    return line or path


def _baseline_band(axes: Any, baseline: Mapping[str, Any]) -> list[tuple[Any, str]]:
    estimate = baseline["val_loss"]
    if estimate["mean"] is None:
        return []
    line = axes.axhline(estimate["mean"], color=BASELINE_COLOR, linewidth=1.2, zorder=1)
    if estimate["ci_low"] is not None:
        axes.axhspan(estimate["ci_low"], estimate["ci_high"], color=BASELINE_COLOR, alpha=0.15, linewidth=0, zorder=0)
    return [(line, baseline["scheme"])]


def _breaks(axes: Any, points: Sequence[tuple[str, Any]], places: Sequence[tuple[float, bool]]) -> None:
    """Two strokes across the x axis, where the numbers end and infinity or words follow."""
    numbers, outside = [x for x, is_number in places if is_number], [x for x, is_number in places if not is_number]
    if numbers and outside:
        middle = (max(numbers) + min(outside)) / 2
        axes.text(
            middle, 0, "//", transform=axes.get_xaxis_transform(), ha="center", va="center", color="#777777",
            fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


# --- shared ---


def _faint(axes: Any, x: float, losses: Sequence[float], look: Look, high: float) -> None:
    """Single seeds. Those above the scale are left to the mean or the ring, which then lie at the edge."""
    inside = [loss for loss in losses if loss <= high]
    axes.plot([x] * len(inside), inside, look.marker, color=look.color, alpha=0.35, markersize=4.5, linestyle="")
    if len(inside) < len(losses):
        axes.plot([x], [high], "^", color=look.color, alpha=0.55, markersize=5, clip_on=False, linestyle="")


def _at_edge(axes: Any, x: float, high: float, look: Look, marker: str) -> None:
    size = {"x": {"markersize": 7, "markeredgewidth": 2}, "^": {"markersize": 6}}[marker]
    axes.plot([x], [high], marker, color=look.color, linestyle="", clip_on=False, zorder=5, **size)


def _ticks(axes: Any, spacing: Sequence[float], places: Sequence[float], labels: Sequence[str]) -> None:
    """A tick at every place, with slanted labels if level ones would overlap; `spacing` is where they lie on paper."""
    order = sorted(zip(spacing, labels, strict=True))
    span = order[-1][0] - order[0][0]
    # About 60 characters fit the width of the axes.
    crowded = any(b - a < span * (len(x) + len(y) + 2) / 120 for (a, x), (b, y) in itertools.pairwise(order))
    slant = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(list(places), list(labels), **slant)
    axes.minorticks_off()
