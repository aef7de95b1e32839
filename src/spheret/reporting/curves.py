"""The figures drawn from run folders over training: loss curves, and the connections at every evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from spheret.comparison.statistics import has_finished
from spheret.reporting.collect import ComparisonFolder
from spheret.reporting.depth import Points, depth_plots
from spheret.reporting.style import (
    Look,
    Plot,
    legend_below,
    log_scale,
    looks,
    new_figure,
    render,
    styled,
    token_formatter,
)

# Lists of metrics.jsonl with an entry per connection, and how they are shown over training.
TRACKED = (
    ("angle_deg", "Rotation during training", "angle (degrees)"),
    ("saturation", "Saturation during training", "theta / (p 90 degrees)"),
    ("alpha", "Step size during training", "alpha"),
    ("p", "Exponent during training", "p"),
    ("skip_gain", "Gain of the skip path during training", "gain of the skip path"),
)


MOST_BANDS = 4
"""The bands of more schemes than this would cover each other, and are left out."""


def run_plots(comparison: ComparisonFolder) -> list[Plot]:
    """All figures that the run folders have data for: the loss curves, the connections over time, then over depth."""
    styles = looks([entry["scheme"] for entry in comparison.results["schemes"]])
    with styled():
        drawn = [_loss_curves(comparison, styles)]
        drawn += [_over_training(comparison, *tracked, styles) for tracked in TRACKED]
        drawn += depth_plots(comparison, styles)
    return [plot for plot in drawn if plot is not None]


def _loss_curves(comparison: ComparisonFolder, styles: Mapping[str, Look]) -> Plot | None:
    entries = comparison.results["schemes"]
    # The mean covers the same runs as that of the table: all that finished, collapsed ones included.
    finished = {entry["scheme"]: _curves(comparison, entry, has_finished) for entry in entries}
    failed = {entry["scheme"]: _curves(comparison, entry, lambda run: not has_finished(run)) for entry in entries}
    good = [curve for curves in finished.values() for curve in curves]
    bad = [curve for curves in failed.values() for curve in curves]
    if all(len(curve) < 2 for curve in (*good, *bad)):  # evaluated once: the figure of final losses shows it
        return None
    limits = _loss_limits(good or bad)
    figure, axes = new_figure(3.1)
    handles = []
    for scheme, look in styles.items():
        line = _mean_and_band(axes, finished[scheme], look)
        thin = [_thin(axes, curve, look, limits[1]) for curve in failed[scheme]]
        if line or thin:
            handles.append((line or thin[0], scheme))
    _plateau(axes, comparison.results, limits)
    axes.set_ylim(*limits)
    axes.set_xlim(0, 1.015 * max(curve[-1][0] for curve in (*good, *bad)))
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(token_formatter())
    axes.set_ylabel("validation loss (nats/token)")
    legend_below(figure, handles)
    caption = "Line: mean over seeds; band: lowest to highest seed. The start of training is cut off."
    if bad:
        caption += (
            " Thin lines that end in a cross: single runs that diverged or were interrupted. The mean does not include "
            "them. A cross on the upper edge stands for a loss above it."
        )
    if any(entry.get("collapsed") for entry in entries):
        caption += " Runs that collapsed did finish: the mean and the band include them, as the table does."
    return render(
        figure,
        key="loss_curves",
        title="Validation loss during training",
        caption=caption,
        alt="Validation loss against training tokens, one line per scheme: "
        + ", ".join(name for _, name in handles)
        + ".",
    )


def _curves(
    comparison: ComparisonFolder, entry: Mapping[str, Any], wanted: Callable[[Mapping[str, Any]], bool]
) -> list[Points]:
    """(tokens, validation loss) at every evaluation of the entry's wanted runs. Runs without any are omitted."""
    folders = [comparison.runs[r["run"]] for r in entry["runs"] if r.get("run") in comparison.runs and wanted(r)]
    curves = [
        [(float(m["tokens"]), float(m["val_loss"])) for m in f.metrics if m.get("val_loss") is not None]
        for f in folders
    ]
    return [curve for curve in curves if curve]


def _loss_limits(curves: Sequence[Points]) -> tuple[float, float]:
    """Limits from just below the best final loss to the highest loss after a fifth of training.

    The upper limit is at most the median of the curves' first losses. The steep start would flatten all the rest.
    """
    late = [y for curve in curves for x, y in curve if x >= curve[-1][0] / 5]
    ends = [curve[-1][1] for curve in curves]
    low = min(ends)
    high = max(min(max(late), median(curve[0][1] for curve in curves)), median(ends))
    margin = 0.05 * (high - low) or 0.01 * abs(low)
    return low - margin, high + margin


def _mean_and_band(axes: Any, curves: Sequence[Points], look: Look) -> Any:
    if not curves:
        return None
    tables = [dict(curve) for curve in curves]
    xs = sorted(set(tables[0]).intersection(*tables[1:]))  # a mean over fewer seeds would jump
    columns = [[table[x] for table in tables] for x in xs]
    if len(curves) > 1:
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(xs, low, high, color=look.color, alpha=0.18, linewidth=0)
    single = look.marker if len(xs) == 1 else ""  # a line through one point cannot be seen
    (line,) = axes.plot(xs, [fmean(c) for c in columns], marker=single, color=look.color, linestyle=look.dash)
    return line


def _thin(axes: Any, curve: Points, look: Look, high: float) -> Any:
    """Draw one run as a thin line, with a cross at its last evaluation (on the upper edge if that lies above it)."""
    (line,) = axes.plot(*zip(*curve, strict=True), color=look.color, linewidth=0.8, alpha=0.8)
    x, y = curve[-1]
    axes.plot([x], [min(y, high)], "x", color=look.color, markersize=7, markeredgewidth=1.8, clip_on=False, zorder=5)
    return line


def _plateau(axes: Any, results: Mapping[str, Any], limits: tuple[float, float]) -> None:
    plateau = (results.get("data") or {}).get("unigram_loss")
    if plateau is not None and limits[0] < plateau < limits[1]:
        axes.axhline(plateau, color="#999999", linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            "token frequencies only", (1, plateau), (0, 2), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", color="#666666", fontsize=8,
        )  # fmt: skip


def _over_training(
    comparison: ComparisonFolder, key: str, title: str, axis: str, styles: Mapping[str, Look]
) -> Plot | None:
    """One list of `connections` in metrics.jsonl over the tokens trained on."""
    bands = {}
    for entry in comparison.results["schemes"]:
        # One seed: over several, the band would mix the spread of seeds with that of the connections.
        folder = next(iter(comparison.finished(entry)), None)
        if folder is not None and len(points := _spread(folder.metrics, key)) > 1:
            bands[entry["scheme"]] = points
    if key == "p":  # a fixed exponent is no news
        bands = {scheme: points for scheme, points in bands.items() if len({p[1:] for p in points}) > 1}
    if not bands:
        return None
    figure, axes = new_figure(2.7)
    handles = []
    if len(bands) > MOST_BANDS:
        bands = {scheme: [(t, middle, middle, middle) for t, _, middle, _ in p] for scheme, p in bands.items()}
    for scheme, points in bands.items():
        look, (tokens, low, middle, high) = styles[scheme], zip(*points, strict=True)
        axes.fill_between(tokens, low, high, color=look.color, alpha=0.15, linewidth=0)
        (line,) = axes.plot(tokens, middle, color=look.color, linestyle=look.dash)
        handles.append((line, scheme))
    values = [y for points in bands.values() for point in points for y in point[1:]]
    if min(values) > 0 and max(values) > 20 * min(values):
        log_scale(axes)
    axes.set_xlim(0, 1.015 * max(points[-1][0] for points in bands.values()))
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(token_formatter())
    axes.set_ylabel(axis)
    legend_below(figure, handles)
    ends = "; ".join(f"{scheme} from {points[0][2]:.3g} to {points[-1][2]:.3g}" for scheme, points in bands.items())
    return render(
        figure,
        key=f"{key}_over_training",
        title=title,
        caption="At every evaluation"
        + (" of the first seed that finished" if comparison.has_seeds else "")
        + ". Line: median over the connections"
        + ("." if len(bands) > MOST_BANDS else "; band: from the smallest to the largest."),
        alt=f"{title}, median over connections: {ends}.",
    )


def _spread(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float, float, float]]:
    """(tokens, smallest, median, largest over connections) at every evaluation that recorded ``key``."""
    points = []
    for record in metrics:
        values = [v for v in (record.get("connections") or {}).get(key) or [] if isinstance(v, int | float)]
        values = [float(v) for v in values if math.isfinite(v)]
        if values:
            points.append((float(record["tokens"]), min(values), median(values), max(values)))
    return points
