"""The figures over depth: what each connection does, sublayer by sublayer, at the first evaluation and at the last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from spheret.reporting.collect import ComparisonFolder, RunFolder
from spheret.reporting.style import Look, Plot, legend_below, log_scale, new_figure, render

Points = list[tuple[float, float]]
CAP_ROOM = 6.0
"""Caps up to this many times the largest angle are drawn; higher ones would flatten the angles."""


@dataclass(frozen=True)
class LayerMetric:
    """One list with an entry per connection, of metrics.jsonl or diagnostics.json, and how it is shown."""

    key: str
    title: str
    axis: str
    caption: str
    of_stream: bool = False
    """Whether it describes the hidden state after a sublayer, and not what the sublayer does to it."""


LAYER_METRICS = (
    LayerMetric(
        "hidden_norm",
        "Size of the hidden state",
        "mean |h| / sqrt(d)",
        "After each sublayer, at the end of training. If the size is constant, the hidden state stays on its sphere.",
        of_stream=True,
    ),
    LayerMetric(
        "angle_deg",
        "Rotation by each sublayer",
        "angle between h and h' (degrees)",
        "How far each sublayer turns the hidden state, at the last evaluation.",
    ),
    LayerMetric(
        "saturation",
        "How near each sublayer comes to its largest angle",
        "theta / (p 90 degrees)",
        "The angle as a share of the largest that p allows, at the last evaluation. At 1, the exponent p limits how "
        "far an update turns the hidden state; near 0, p changes nothing. It is 0 at p = inf.",
    ),
    LayerMetric(
        "alpha",
        "Step size of each sublayer",
        "alpha",
        "The learned step size, without the constant of the layer, at the last evaluation.",
    ),
    LayerMetric("p", "Exponent of each sublayer", "p", "The exponent at the last evaluation."),
    LayerMetric(
        "token_cosine",
        "Similarity of different tokens",
        "mean cosine between tokens",
        "Mean cosine between the hidden states of different positions. Near 1, all tokens look the same to the model.",
        of_stream=True,
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


def depth_plots(comparison: ComparisonFolder, styles: Mapping[str, Look]) -> list[Plot]:
    """One figure for each quantity that the runs have data for."""
    drawn = [over_depth(comparison, metric, styles) for metric in LAYER_METRICS]
    return [plot for plot in drawn if plot is not None]


def over_depth(comparison: ComparisonFolder, metric: LayerMetric, styles: Mapping[str, Look]) -> Plot | None:
    """One quantity over depth, or None if no run has data for it."""
    profiles = _profiles(comparison, metric.key)
    if not profiles:
        return None
    first = _profiles(comparison, metric.key, first=True)
    changed = {scheme: profile for scheme, profile in first.items() if profile != profiles.get(scheme)}
    figure, panels = _panels(metric, profiles)
    handles = []
    for scheme, profile in profiles.items():
        look = styles[scheme]
        _draw(panels, changed.get(scheme, []), color=look.color, linestyle=look.dash, linewidth=1, alpha=0.4)
        line = _draw(panels, profile, color=look.color, linestyle=look.dash, marker=look.marker, ms=3.2)
        handles.append((line, scheme))
    values = [y for profile in (*profiles.values(), *changed.values()) for _, y in profile]
    caption = metric.caption + (" Faint: at the first evaluation." if changed else "")
    axes = panels[0][1]
    highest = CAP_ROOM * max(values)
    caps = _caps(_profiles(comparison, "p")) if metric.key == "angle_deg" else {}
    low = {scheme: found for scheme, found in caps.items() if min(y for _, y in found) <= highest}
    for scheme, found in low.items():
        _draw(panels, found, color=styles[scheme].color, linestyle=(0, (1, 1.5)), linewidth=1)
    seen = [y for found in low.values() for _, y in found]
    values += [y for y in seen if y <= highest]
    if min(values) > 0 and max(values) > 20 * min(values):
        log_scale(axes)
    elif max(values) - min(values) < 0.02 * abs(max(values)):
        middle = (max(values) + min(values)) / 2  # show a flat profile as flat, and do not magnify its rounding
        axes.set_ylim(middle - 0.1 * abs(middle), middle + 0.1 * abs(middle))
    if seen and max(seen) > highest:  # the line of the caps leaves the figure
        axes.set_ylim(None if axes.get_yscale() == "log" else 0, highest)
    if metric.key == "angle_deg":
        caption += _cap_words(caps, low) + _turn_words(profiles, caps)
    legend_below(figure, handles)
    if len(panels) > 1:  # in the middle of the panels, which end where the legend begins
        figure.supylabel(metric.axis, y=1 - 1.6 / figure.get_figheight(), fontsize=9, color="#222222")
    ends = "; ".join(
        f"{scheme} from {profile[0][1]:.3g} to {profile[-1][1]:.3g}" for scheme, profile in profiles.items()
    )
    return render(
        figure,
        key=metric.key,
        title=metric.title,
        caption=caption + (" Mean over the seeds that finished." if comparison.has_seeds else ""),
        alt=f"{metric.title} by layer, first to last sublayer: {ends}.",
    )


# The sublayers that a panel shows, and its axes.
Panel = tuple[str, Any]


def _panels(metric: LayerMetric, profiles: Mapping[str, Points]) -> tuple[Any, list[Panel]]:
    """One panel for attention and one for the MLP, or a single one for what the stream carries from one to the other.

    The two differ so much that one line through both would only go up and down.
    """
    kinds = {_is_attention(x) for profile in profiles.values() for x, _ in profile}
    if metric.of_stream or len(kinds) < 2:
        figure, axes = new_figure(2.7)
        axes.set_ylabel(metric.axis)
        axes.set_xlabel("layer (attention, then MLP)")
        panels = [("both", axes)]
    else:
        figure, top = new_figure(1.7, below=1.7)
        panels = [("attention", top), ("MLP", figure.axes[1])]
        figure.axes[1].sharey(top)
        for name, axes in panels:
            axes.set_title(name, loc="left", fontsize=9, color="#444444")
        figure.axes[1].set_xlabel("layer")
    for _, axes in panels:
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, panels


def _draw(panels: Sequence[Panel], profile: Points, **style: Any) -> Any:
    """Draw each panel's part of the profile; returns the last line, for the legend."""
    line = None
    for name, axes in panels:
        if name == "both":
            points = profile
        else:  # both sublayers of layer l stand at l
            wanted = name == "attention"
            points = [(float(math.ceil(x)), y) for x, y in profile if _is_attention(x) == wanted]
        if points:
            (line,) = axes.plot(*zip(*points, strict=True), **style)
    return line


def _is_attention(x: float) -> bool:
    return x != int(x)


def _caps(exponents: Mapping[str, Points]) -> dict[str, Points]:
    """p 90 degrees, the largest angle of each connection."""
    return {scheme: [(x, 90 * p) for x, p in profile] for scheme, profile in exponents.items()}


def _cap_words(caps: Mapping[str, Points], drawn: Mapping[str, Points]) -> str:
    above = []
    for scheme in caps.keys() - drawn.keys():
        ends = dict.fromkeys(f"{end(y for _, y in caps[scheme]):.3g}" for end in (min, max))
        above.append(f"{scheme} {' to '.join(ends)}")
    words = " Dotted: the largest angle that p allows." if drawn else ""
    return words + (f" Largest angles above the figure, in degrees: {', '.join(sorted(above))}." if above else "")


def _turn_words(profiles: Mapping[str, Points], caps: Mapping[str, Points]) -> str:
    """The sum of the angles, the farthest that all sublayers together can turn a token, beside the sum of the caps."""
    sums = []
    for scheme, profile in profiles.items():
        most = f" of at most {sum(y for _, y in caps[scheme]):.0f}" if scheme in caps else ""
        sums.append(f"{scheme} {sum(y for _, y in profile):.0f}{most}")
    return f" Sum over all sublayers, in degrees: {', '.join(sums)}."


def _profiles(comparison: ComparisonFolder, key: str, *, first: bool = False) -> dict[str, Points]:
    """The profile of each scheme that has one, a mean over its seeds: at the last evaluation, or at the first."""
    found = {
        entry["scheme"]: _mean_profile([_measured(run, key, first) for run in comparison.finished(entry)])
        for entry in comparison.results["schemes"]
    }
    return {scheme: profile for scheme, profile in found.items() if profile}


def _measured(run: RunFolder, key: str, first: bool) -> Points:
    """(position, value) of the finite values of one run.

    Layers count from 1. The attention sublayer of layer l is at l - 0.5 and its MLP at l.
    """
    lists = [values for m in run.metrics if (values := (m.get("connections") or {}).get(key))]
    if first and len(lists) < 2:
        return []
    if lists:  # a run that has not ended has these only
        positions, values = [(i + 1) / 2 for i in range(len(lists[0]))], lists[0 if first else -1]
    else:
        values, layers = run.diagnostics.get(key), run.diagnostics.get("layer")
        if not isinstance(values, list) or not isinstance(layers, list):
            return []
        sublayers = run.diagnostics.get("sublayer") or [None] * len(layers)
        positions = [x - 0.5 * (sublayer == "attn") for x, sublayer in zip(layers, sublayers, strict=False)]
    return [
        (x, float(value))
        for x, value in zip(positions, values, strict=False)
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def _mean_profile(profiles: Sequence[Points]) -> Points:
    columns: dict[float, list[float]] = {}
    for x, value in (point for profile in profiles for point in profile):
        columns.setdefault(x, []).append(value)
    return [(x, fmean(columns[x])) for x in sorted(columns)]
