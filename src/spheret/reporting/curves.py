"""The figures drawn from run folders: loss curves, the connections during training, the stream layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from spheret.comparison.statistics import has_finished
from spheret.reporting.collect import ComparisonFolder, RunFolder
from spheret.reporting.style import Look, Plot, legend_below, looks, new_figure, render, styled

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class LayerMetric:
    """One list of diagnostics.json, and how it is shown."""

    key: str
    title: str
    axis: str
    caption: str


LAYER_METRICS = (
    LayerMetric(
        "hidden_norm",
        "Size of the hidden state",
        "mean |h| / sqrt(d)",
        "After each sublayer, at the end of training. If the size is constant, the hidden state stays on its sphere.",
    ),
    LayerMetric(
        "angle_deg",
        "Rotation by each sublayer",
        "angle between h and h' (degrees)",
        "How far each sublayer turns the hidden state, at the end of training.",
    ),
    LayerMetric(
        "saturation",
        "How near each sublayer comes to its largest angle",
        "theta / (p 90 degrees)",
        "The angle as a share of the largest that p allows, at the end of training. At 1, the exponent p limits how "
        "far an update turns the hidden state; near 0, p changes nothing. It is 0 at p = inf.",
    ),
    LayerMetric(
        "alpha",
        "Step size of each sublayer",
        "alpha",
        "The learned step size, without the constant of the layer, at the end of training.",
    ),
    LayerMetric("p", "Exponent of each sublayer", "p", "The exponent at the end of training."),
    LayerMetric(
        "token_cosine",
        "Similarity of different tokens",
        "mean cosine between tokens",
        "Mean cosine between the hidden states of different positions. Near 1, all tokens look the same to the model.",
    ),
    LayerMetric(
        "skip_gain",
        "Gain of the skip path",
        "gain of the skip path",
        "The factor with which each connection passes on the hidden state, and the gradient.",
    ),
    LayerMetric(
        "update_ratio",
        "Size of the update",
        "|update| / |h|",
        "Norm of each sublayer's output relative to the hidden state, before the scheme scales or projects it.",
    ),
)


# Lists of metrics.jsonl with an entry per connection, and how they are shown over training.
TRACKED = (
    ("angle_deg", "Rotation during training", "angle (degrees)"),
    ("saturation", "Saturation during training", "theta / (p 90 degrees)"),
    ("alpha", "Step size during training", "alpha"),
    ("p", "Exponent during training", "p"),
    ("skip_gain", "Gain of the skip path during training", "gain of the skip path"),
)


def run_plots(comparison: ComparisonFolder) -> list[Plot]:
    """All figures that the run folders have data for: the loss curves, the connections over time, then over depth."""
    styles = looks([entry["scheme"] for entry in comparison.results["schemes"]])
    with styled():
        drawn = [_loss_curves(comparison, styles)]
        drawn += [_over_training(comparison, *tracked, styles) for tracked in TRACKED]
        drawn += [_layers(comparison, metric, styles) for metric in LAYER_METRICS]
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
        folder = next(iter(_finished_folders(comparison, entry)), None)
        if folder is not None and len(points := _spread(folder.metrics, key)) > 1:
            bands[entry["scheme"]] = points
    if key == "p":  # a fixed exponent is no news
        bands = {scheme: points for scheme, points in bands.items() if len({p[1:] for p in points}) > 1}
    if not bands:
        return None
    figure, axes = new_figure(2.7)
    handles = []
    for scheme, points in bands.items():
        look, (tokens, low, middle, high) = styles[scheme], zip(*points, strict=True)
        axes.fill_between(tokens, low, high, color=look.color, alpha=0.15, linewidth=0)
        (line,) = axes.plot(tokens, middle, color=look.color, linestyle=look.dash)
        handles.append((line, scheme))
    values = [y for points in bands.values() for point in points for y in point[1:]]
    if min(values) > 0 and max(values) > 20 * min(values):
        _log_scale(axes)
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
        + (" of the first seed that finished" if _has_seeds(comparison) else "")
        + ". Line: median over the connections; band: from the smallest to the largest.",
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


def _layers(comparison: ComparisonFolder, metric: LayerMetric, styles: Mapping[str, Look]) -> Plot | None:
    profiles = {
        entry["scheme"]: _mean_profile(_finished_folders(comparison, entry), metric.key)
        for entry in comparison.results["schemes"]
    }
    profiles = {scheme: profile for scheme, profile in profiles.items() if profile}
    if not profiles:
        return None
    figure, axes = new_figure(2.7)
    handles = []
    for scheme, profile in profiles.items():
        look = styles[scheme]
        (line,) = axes.plot(
            *zip(*profile, strict=True), color=look.color, linestyle=look.dash, marker=look.marker, ms=3.2
        )
        handles.append((line, scheme))
    values = [y for profile in profiles.values() for _, y in profile]
    caption = metric.caption
    if metric.key == "angle_deg":
        capped = _caps(axes, comparison, styles, 3 * max(values))
        caption += _turn_words(profiles) + (" Dotted: the largest angle that p allows." if capped else "")
    if min(values) > 0 and max(values) > 20 * min(values):
        _log_scale(axes)
    elif max(values) - min(values) < 0.02 * abs(max(values)):
        middle = (max(values) + min(values)) / 2  # show a flat profile as flat, and do not magnify its rounding
        axes.set_ylim(middle - 0.1 * abs(middle), middle + 0.1 * abs(middle))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (attention, then MLP)")
    axes.set_ylabel(metric.axis)
    legend_below(figure, handles)
    ends = "; ".join(
        f"{scheme} from {profile[0][1]:.3g} to {profile[-1][1]:.3g}" for scheme, profile in profiles.items()
    )
    return render(
        figure,
        key=metric.key,
        title=metric.title,
        caption=caption + (" Mean over the seeds that finished." if _has_seeds(comparison) else ""),
        alt=f"{metric.title} by layer, first to last sublayer: {ends}.",
    )


def _caps(axes: Any, comparison: ComparisonFolder, styles: Mapping[str, Look], highest: float) -> bool:
    """Draw ``p 90`` degrees, the largest angle of each connection, where it is not far above the angles."""
    drawn = False
    for entry in comparison.results["schemes"]:
        exponents = _mean_profile(_finished_folders(comparison, entry), "p")
        if exponents and max(90 * p for _, p in exponents) <= highest:
            look, points = styles[entry["scheme"]], [(x, 90 * p) for x, p in exponents]
            axes.plot(*zip(*points, strict=True), color=look.color, linestyle=(0, (1, 1.5)), linewidth=1)
            drawn = True
    return drawn


def _turn_words(profiles: Mapping[str, Points]) -> str:
    sums = ", ".join(f"{scheme} {sum(y for _, y in profile):.0f}" for scheme, profile in profiles.items())
    return f" Sum over all sublayers, in degrees: {sums}."


def _has_seeds(comparison: ComparisonFolder) -> bool:
    return any(len(entry["runs"]) > 1 for entry in comparison.results["schemes"])


def _finished_folders(comparison: ComparisonFolder, entry: Mapping[str, Any]) -> list[RunFolder]:
    named = [run["run"] for run in entry["runs"] if has_finished(run)]
    return [comparison.runs[name] for name in named if name in comparison.runs]


def _mean_profile(folders: Sequence[RunFolder], key: str) -> Points:
    """(layer, mean over runs) of the finite values.

    Layers count from 1. The attention sublayer of layer l is at l - 0.5 and its MLP at l.
    """
    columns: dict[float, list[float]] = {}
    for folder in folders:
        values, layers = folder.diagnostics.get(key), folder.diagnostics.get("layer")
        if not isinstance(values, list) or not isinstance(layers, list):
            continue
        sublayers = folder.diagnostics.get("sublayer") or [None] * len(layers)
        for layer, sublayer, value in zip(layers, sublayers, values, strict=False):
            if isinstance(value, int | float) and math.isfinite(value):
                columns.setdefault(layer - (0.5 if sublayer == "attn" else 0.0), []).append(float(value))
    return [(x, fmean(columns[x])) for x in sorted(columns)]


def _log_scale(axes: Any) -> None:
    """A logarithmic y axis with plain numbers 1, 2, 5, 10: labels such as 3 x 10^0 are long and cover each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def token_formatter() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")
