"""The lines of metrics.jsonl, and run.json made from them and the state."""

from __future__ import annotations

import math
import statistics
from typing import Any

from spheret.diagnostics.monitor import Event
from spheret.evaluation import Evaluation
from spheret.training.environment import machine, versions
from spheret.training.files import RUN, read_metrics, write_json
from spheret.training.result import Outcome, RunResult
from spheret.training.run import Run
from spheret.training.state import TrainState


def log_record(
    run: Run, state: TrainState, measured: dict[str, float], evaluation: Evaluation | None, event: Event | None
) -> dict[str, Any]:
    """One line of metrics.jsonl: the counters, what was measured, and an evaluation and an event where there is one."""
    tokens = state.step * run.config.tokens_per_step
    record: dict[str, Any] = {
        "step": state.step,
        "tokens": tokens,
        **measured,
        "elapsed_s": state.seconds,
        "skipped": state.skipped,
    }
    if event is not None:
        record |= {"event": event.kind, "event_message": event.message}
    return record | _evaluation_record(evaluation)


def write_result(
    run: Run, state: TrainState, outcome: Outcome, reason: str | None, evaluation: Evaluation | None = None
) -> RunResult:
    """Write run.json and return the same; without an evaluation the last one in metrics.jsonl counts."""
    result = _summarise(run, state, outcome, reason, evaluation)
    environment = {
        "versions": versions(),
        "machine": machine(run.device),
        "data": run.dataset.summary(),
    }
    write_json(run.out / RUN, {**result.to_dict(), **environment})
    return result


def _evaluation_record(evaluation: Evaluation | None) -> dict[str, Any]:
    if evaluation is None:
        return {}
    return {"val_loss": evaluation.loss, "val_se": evaluation.standard_error, "val_bpb": evaluation.bits_per_byte}


def _summarise(
    run: Run, state: TrainState, outcome: Outcome, reason: str | None, evaluation: Evaluation | None
) -> RunResult:
    lines = read_metrics(run.out)
    evaluated = [line for line in lines if "val_loss" in line]
    values = _evaluation_record(evaluation) or (evaluated[-1] if evaluated else {})
    # The first line covers the step that warmed up the caches.
    speeds = [line["tokens_per_s"] for line in (lines[1:] or lines)]
    return RunResult(
        folder=run.out,
        outcome=outcome,
        reason=reason,
        step=state.step,
        tokens=state.step * run.config.tokens_per_step,
        val_loss=_finite(values.get("val_loss")),
        val_se=_finite(values.get("val_se")),
        val_bpb=_finite(values.get("val_bpb")),
        train_loss=_finite(state.monitor.smoothed),
        unigram_loss=run.validation.unigram_loss,
        parameters=sum(p.numel() for p in state.model.parameters()),
        tokens_per_s=statistics.median(speeds) if speeds else None,
        seconds=state.seconds,
        spikes=state.monitor.spikes,
        skipped_steps=state.skipped,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
