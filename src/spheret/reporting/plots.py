"""The figures drawn from results.json alone, one row per scheme: differences to the baseline, and final losses.

Those of the loss over a setting, which come first in the report, are in `sweeps.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from spheret.comparison.statistics import call, has_finished
from spheret.reporting.style import (
    BELOW,
    BESIDE,
    LINE,
    Look,
    Plot,
    looks,
    new_figure,
    render,
    styled,
    wrapped,
)

Limits = tuple[float, float]

# In figures with one row per scheme, in inches: least height of a row, its seeds below its mean, axis and its label.
_ROW, _SEEDS, _AXIS = 0.32, 0.065, 0.8


def result_plots(results: Mapping[str, Any]) -> list[Plot]:
    """Differences and final losses, as far as results.json has data for them."""
    styles = looks([entry["scheme"] for entry in results["schemes"]])
    with styled():
        drawn = [_differences(results, styles), _final_losses(results, styles)]
    return [plot for plot in drawn if plot is not None]


def _differences(results: Mapping[str, Any], styles: Mapping[str, Look]) -> Plot | None:
    entries = [e for e in results["schemes"][1:] if e.get("difference") and e["difference"].get("mean") is not None]
    if not entries:
        return None
    baseline = results["schemes"][0]["scheme"]
    means = [entry["difference"]["mean"] for entry in entries]
    intervals = [[entry["difference"][key] for key in ("mean", "ci_low", "ci_high")] for entry in entries]
    limits = difference_limits([[x for x in interval if x is not None] for interval in intervals])
    axes, rows = _one_row_a_scheme(entries, limits, f"difference to {baseline} (nats/token)")
    axes.axvline(0, color="#222222", linewidth=1)
    for y, entry, mean in zip(rows, entries, means, strict=True):
        look, paired = styles[entry["scheme"]], entry["difference"]
        _interval(axes, paired, y, limits, look)
        # Filled or hollow follows the corrected verdict, which an interval that excludes zero may not reach.
        solid = call(paired) in ("better", "worse")
        face = look.color if solid else "white"
        _point(axes, mean, y, limits, look, markersize=7, markerfacecolor=face)
    shown = "; ".join(f"{e['scheme']} {m:+.4f}" for e, m in zip(entries, means, strict=True))
    return render(
        axes.figure,
        key="differences",
        title=f"Difference to {baseline}",
        caption="Left of the line is better. Paired by seed, with 95% intervals. Filled: better or worse at 95% "
        "after Holm's correction. Hollow: not distinguishable, or too few seeds. Arrow: the interval continues.",
        alt=f"Difference in validation loss to {baseline}, nats per token: {shown}.",
    )


def _final_losses(results: Mapping[str, Any], styles: Mapping[str, Look]) -> Plot | None:
    entries = [entry for entry in results["schemes"] if any(has_finished(run) for run in entry["runs"])]
    if not entries:
        return None
    # Collapsed runs would stretch the axis upwards, so they set it only if there is nothing else.
    good = [r["val_loss"] for e in entries for r in e["runs"] if has_finished(r) and not r.get("collapsed")]
    ends = [e["val_loss"][k] for e in entries if not e.get("collapsed") for k in ("ci_low", "ci_high")]
    anything = [r["val_loss"] for e in entries for r in e["runs"] if has_finished(r)]
    shown = [x for x in anything if x <= min(good)] + good if good else anything
    limits = robust_limits(shown, [end for end in ends if end is not None], widen=2)
    axes, rows = _one_row_a_scheme(entries, limits, "final validation loss (nats/token)", lines=2)
    for y, entry in zip(rows, entries, strict=True):
        _seeds_and_mean(axes, y, entry, styles[entry["scheme"]], limits)
    baseline = results["schemes"][0]
    if baseline in entries and baseline["val_loss"]["mean"] <= limits[1]:
        axes.axvline(baseline["val_loss"]["mean"], color="#777777", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    means = "; ".join(f"{entry['scheme']} {entry['val_loss']['mean']:.4f}" for entry in entries)
    return render(
        axes.figure,
        key="final_loss",
        title="Final validation loss",
        caption="Faint points: single seeds. Bars: mean and 95% interval. Dashed: mean of the first scheme. Triangles "
        "at the edge: seeds or a mean beyond it, with their values. Arrow: the interval continues.",
        alt=f"Mean final validation loss, nats per token: {means}.",
    )


def _seeds_and_mean(axes: Any, y: float, entry: Mapping[str, Any], look: Look, limits: Limits) -> None:
    estimate, high = entry["val_loss"], limits[1]
    losses = sorted(r["val_loss"] for r in entry["runs"] if has_finished(r))
    inside, beyond = [x for x in losses if x <= high], [x for x in losses if x > high]
    axes.plot(inside, [y + _SEEDS] * len(inside), look.marker, color=look.color, alpha=0.55, markersize=5, linestyle="")
    _interval(axes, estimate, y, limits, look)
    values = []
    if estimate["mean"] > high:
        values.append(f"mean {estimate['mean']:.4g}")
        axes.plot([high], [y], ">", color=look.color, markersize=7, clip_on=False, zorder=5)
    else:
        _point(axes, estimate["mean"], y, limits, look, marker="|", markersize=13, markeredgewidth=2.4)
    if beyond:
        first, last = f"{beyond[0]:.4g}", f"{beyond[-1]:.4g}"
        values.append(("seeds " if len(beyond) > 1 else "seed ") + (first if first == last else f"{first} to {last}"))
        axes.plot([high], [y + _SEEDS], ">", color=look.color, alpha=0.55, markersize=5, clip_on=False, zorder=5)
    if values:  # to the right of the axes, where they cover nothing
        axes.annotate(
            "\n".join(values), (high, y + _SEEDS / 2), (7, 0), textcoords="offset points", ha="left", va="center",
            color=look.color, fontsize=8,
        )  # fmt: skip


def _interval(axes: Any, estimate: Mapping[str, Any], y: float, limits: Limits, look: Look) -> None:
    """Draw a bar over the interval, with an arrowhead where the frame cuts it."""
    (low, high), (left, right) = limits, (estimate["ci_low"], estimate["ci_high"])
    if left is None or right is None or left > high or right < low:
        return
    axes.plot([max(left, low), min(right, high)], [y, y], color=look.color, linewidth=2.2, solid_capstyle="butt")
    for end, edge, sign in ((left, low, 4), (right, high, 5)):  # carets whose tip lies on the edge
        if not low <= end <= high:
            axes.plot([edge], [y], marker=sign, color=look.color, markersize=6, clip_on=False, zorder=4)


def _point(
    axes: Any, x: float, y: float, limits: Limits, look: Look, *, marker: str | None = None, **style: Any
) -> None:
    """Draw a point. If it lies off the scale, draw a triangle at that edge with the value beside it."""
    low, high = limits
    if low <= x <= high:
        axes.plot([x], [y], marker or look.marker, color=look.color, zorder=4, **style)
        return
    edge, sign, side = (high, ">", "right") if x > high else (low, "<", "left")
    axes.plot([edge], [y], sign, color=look.color, markersize=7, clip_on=False, zorder=5)
    axes.annotate(
        f"{x:.3f}", (edge, y), (-8 if x > high else 8, 0), textcoords="offset points", ha=side, va="center",
        color=look.color, fontsize=8, zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _one_row_a_scheme(
    entries: Sequence[Mapping[str, Any]], limits: Limits, label: str, *, lines: int = 1
) -> tuple[Any, list[float]]:
    """Axes with one row for each scheme, and the middle of each row, in inches from the top.

    A row is as high as its scheme's name, or as `lines` lines of text.
    """
    names = [wrapped(entry["scheme"], BESIDE) for entry in entries]
    heights = [max(_ROW, LINE * max(lines, 1 + name.count("\n")) + 0.05) for name in names]
    bottoms = list(itertools.accumulate(heights))
    label = wrapped(label, BELOW)
    _, axes = new_figure(_AXIS + bottoms[-1] + LINE * label.count("\n"))
    middles = [bottom - height / 2 for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_yticks(middles, names)
    axes.set_ylim(bottoms[-1], 0)
    axes.set_xlim(*limits)
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    return axes, middles


# --- axis limits that one failed run cannot spoil ---


def robust_limits(
    core: Sequence[float], others: Sequence[float] = (), *, reach: float = 4.0, pad: float = 0.06, widen: float = 0.5
) -> Limits:
    """Axis limits that show the bulk of `core`, and as much of `others` as does not squeeze it.

    Losses have a floor but no ceiling. A value is off the scale if its excess over the best one is more than `reach`
    times the median excess of `core` and more than 2% of the best. `others` (for example interval ends) widen the
    limits by up to `widen` times the span of `core` on each side.
    """
    if not core:
        return robust_limits(others, reach=reach, pad=pad, widen=widen) if others else (0.0, 1.0)
    best = min(core)
    ceiling = best + max(reach * median(x - best for x in core), 0.02 * abs(best))
    high = max(x for x in core if x <= ceiling)
    slack = max(widen * (high - best), 0.001 * abs(best), 1e-6)
    low_limit = max(min([best, *others]), best - slack)
    high_limit = min(max([high, *others]), high + slack)
    margin = pad * (high_limit - low_limit) or slack
    return low_limit - margin, high_limit + margin


def difference_limits(intervals: Sequence[Sequence[float]], *, reach: float = 3.0, pad: float = 0.06) -> Limits:
    """Axis limits around zero for differences, each given by its mean and, if there is one, the ends of its interval.

    All are shown in full, except those that extend further from zero than `reach` times the median extent.
    """
    far = [max(map(abs, interval)) for interval in intervals]
    bound = reach * median(far) or 1e-6
    shown = [min(max(x, -bound), bound) for interval in intervals for x in interval]
    low, high = min(0.0, *shown), max(0.0, *shown)
    margin = pad * (high - low) or 1e-6
    return low - margin, high + margin
