"""The report of one run folder: what it came to, in words, rows and figures. The run need not have ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spheret.reporting.collect import ComparisonFolder, RunFolder
from spheret.reporting.curves import run_plots
from spheret.reporting.style import (
    BASELINE_COLOR,
    PALETTE,
    Plot,
    legend_below,
    log_scale,
    new_figure,
    render,
    styled,
    token_formatter,
)
from spheret.reporting.table import number
from spheret.training.run_folder import last_finite_loss

# Events of metrics.jsonl: one of them, several of them.
EVENTS = (
    ("spike", "loss spike", "loss spikes"),
    ("drift", "lasting rise of the loss", "lasting rises of the loss"),
    ("nonfinite", "loss that was not finite", "losses that were not finite"),
)


def outcome_lines(run: RunFolder) -> list[str]:
    """The outcome in a sentence, then what else a reader must know."""
    final, outcome = run.outcome.get("final") or {}, run.outcome.get("outcome")
    last = run.metrics[-1] if run.metrics else {}
    step = f"step {last.get('step', 0):,} of {_steps(run):,}"
    if outcome is None:
        return [f"The run has not ended: {step}."]
    if outcome != "finished":
        verb = "was interrupted" if outcome == "interrupted" else outcome
        lines = [f"The run {verb} at {step}."]
        lines += [f"{run.outcome['reason']}."] if run.outcome.get("reason") else []
        if final.get("last_loss") is not None:
            lines.append(f"{last_finite_loss(final['last_loss'], final.get('last_loss_step'))}.")
        return lines
    loss = f"validation loss {number(final.get('val_loss'), '.4f')}"
    lines = [f"`{_scheme(run)}` finished with {loss} nats/token."]
    if run.outcome.get("collapsed"):
        lines.append("It collapsed: the model knows only how often each token occurs.")
    return lines


def run_rows(run: RunFolder) -> list[tuple[str, str]]:
    """(name, value) of what identifies the run and what it reached."""
    final, data = run.outcome.get("final") or {}, run.outcome.get("data") or {}
    last = run.metrics[-1] if run.metrics else {}
    rows = [
        ("scheme", _scheme(run)),
        ("parameters", number(run.outcome.get("parameters"), ",d")),
        ("data", str(data.get("name") or " ".join((run.config.get("data") or {}).get("data") or []))),
        ("steps", f"{last.get('step', 0):,} of {_steps(run):,}"),
        ("tokens", f"{last.get('tokens', 0):,}"),
        ("learning rate", number(run.config.get("lr"), "g")),
        ("validation loss", _loss_words(run)),
        ("lowest validation loss", _best_words(run)),
        ("bits/byte", number(final.get("val_bpb"), ".4f")),
        ("training loss", number(final.get("train_loss", last.get("loss")), ".4f")),
        ("outcome", str(run.outcome.get("outcome") or "has not ended")),
        ("events", _event_words(run)),
    ]
    return [(name, value) for name, value in rows if value and value != "-"]


def single_run_plots(run: RunFolder) -> list[Plot]:
    """Losses, learning rate and gradient norm over training, then the connections over training and over depth."""
    with styled():
        drawn = [_losses(run), _steps_plot(run)]
    return [plot for plot in drawn if plot] + [plot for plot in run_plots(alone(run)) if plot.key != "loss_curves"]


def alone(run: RunFolder) -> ComparisonFolder:
    """The run as a comparison of one scheme with one seed, so that the figures of comparisons can draw it."""
    # Comparisons draw runs that finished with a loss. This one is drawn as far as it has come.
    ended = {"outcome": "finished", "val_loss": 0.0}
    entry = {"scheme": _scheme(run), "runs": [{"run": "run", "seed": run.config.get("seed"), **ended}]}
    return ComparisonFolder(folder=run.path, results={"schemes": [entry]}, runs={"run": run})


def _losses(run: RunFolder) -> Plot | None:
    training = [(m["tokens"], m["loss"]) for m in run.metrics if _finite(m.get("loss"))]
    validation = [(m["tokens"], m["val_loss"]) for m in run.metrics if _finite(m.get("val_loss"))]
    if len(training) < 2:
        return None
    figure, axes = new_figure(3.1)
    (line,) = axes.plot(*zip(*training, strict=True), color="#999999", linewidth=1)
    handles = [(line, "training, single batches")]
    if validation:
        (line,) = axes.plot(*zip(*validation, strict=True), color=PALETTE[0], marker="o", ms=3.5)
        handles.append((line, "validation"))
    late = [y for x, y in training + validation if x >= training[-1][0] / 10]
    margin = 0.05 * (max(late) - min(late)) or 0.01
    axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlim(0, 1.015 * training[-1][0])
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(token_formatter())
    axes.set_ylabel("loss (nats/token)")
    legend_below(figure, handles)
    return render(
        figure,
        key="losses",
        title="Loss during training",
        caption="The start of training is cut off.",
        alt=f"Training loss from {training[0][1]:.3g} to {training[-1][1]:.3g} nats per token.",
    )


def _steps_plot(run: RunFolder) -> Plot | None:
    records = [m for m in run.metrics if _finite(m.get("lr")) and _finite(m.get("grad_norm"))]
    if len(records) < 2:
        return None
    tokens = [m["tokens"] for m in records]
    figure, axes = new_figure(2.0, below=1.4)
    axes.plot(tokens, [m["grad_norm"] for m in records], color=PALETTE[1])
    log_scale(axes)
    axes.set_ylabel("gradient norm")
    below = figure.axes[1]
    below.plot(tokens, [m["lr"] for m in records], color=BASELINE_COLOR)
    below.set_ylabel("learning rate")
    below.set_xlabel("training tokens")
    below.set_xlim(0, 1.015 * tokens[-1])
    below.xaxis.set_major_formatter(token_formatter())
    return render(
        figure,
        key="steps",
        title="Gradient norm and learning rate",
        caption="The gradient norm is measured before clipping.",
        alt=f"Gradient norm from {records[0]['grad_norm']:.3g} to {records[-1]['grad_norm']:.3g}.",
    )


def _loss_words(run: RunFolder) -> str:
    """The final loss. Of a run that has none yet, the loss of its last evaluation."""
    last, step = run.outcome.get("final") or {}, (run.outcome.get("final") or {}).get("val_step")
    if not _finite(last.get("val_loss")):
        last = next(iter(_evaluated(run)[::-1]), {})
        step = last.get("step")
    if not last:
        return ""
    error = f" ± {last['val_se']:.4f}" if _finite(last.get("val_se")) else ""
    at = f" at step {step:,}" if step not in (None, _steps(run)) else ""
    return f"{last['val_loss']:.4f}{error} nats/token{at}"


def _best_words(run: RunFolder) -> str:
    best = min(_evaluated(run), key=lambda m: float(m["val_loss"]), default=None)
    return "" if best is None else f"{best['val_loss']:.4f} nats/token at step {best['step']:,}"


def _event_words(run: RunFolder) -> str:
    """What went wrong during training: '2 loss spikes (steps 120, 340)', and steps that were skipped."""
    words = []
    for kind, noun, nouns in EVENTS:
        steps = [f"{m['step']:,}" for m in run.metrics if m.get("event") == kind]
        if steps:
            shown = ", ".join(steps[:5]) + (", ..." if len(steps) > 5 else "")
            words.append(f"{len(steps):,} {noun if len(steps) == 1 else nouns} (step{'s' * (len(steps) > 1)} {shown})")
    skipped = run.outcome.get("skipped_steps") or max((m.get("skipped") or 0 for m in run.metrics), default=0)
    if skipped:
        words.append(f"{skipped:,} step{'s' * (skipped > 1)} skipped for gradients that were not finite")
    return "; ".join(words) or ("none" if run.metrics else "")


def _evaluated(run: RunFolder) -> list[dict[str, Any]]:
    return [m for m in run.metrics if _finite(m.get("val_loss"))]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _scheme(run: RunFolder) -> str:
    model: Mapping[str, Any] = run.config.get("model") or {}
    return str(model.get("scheme", model.get("connection", "unknown")))


def _steps(run: RunFolder) -> int:
    return int(run.config.get("steps") or 0)
