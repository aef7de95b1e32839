"""The training loop. It talks to the model, the data and the monitor, and never names a scheme."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spheret.data import Dataset, prepare
from spheret.evaluation import Evaluation
from spheret.training.accumulate import clip_gradients
from spheret.training.checkpoint import load_checkpoint, save_checkpoint
from spheret.training.compiling import compile_or_eager, wants_compile
from spheret.training.config import TrainConfig
from spheret.training.files import DIAGNOSTICS, MetricsLog, write_json
from spheret.training.folder import check_same_config, finished_result, open_run
from spheret.training.interrupt import StopSignals
from spheret.training.records import log_record, write_result
from spheret.training.result import RunResult
from spheret.training.run import Run
from spheret.training.state import TrainState, initial_state
from spheret.training.update import divergence, update_parameters
from spheret.training.validation import check_vocabulary

OnLog = Callable[[dict[str, Any]], None]


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    dataset: Dataset | None = None,
    resume: bool = False,
    on_log: OnLog | None = None,
) -> RunResult:
    """Train one model into the folder `out` (config.json, metrics.jsonl, checkpoints/, diagnostics.json, run.json).

    On a CPU the result depends on `config` and the data alone; the caller's random state is left as it was. `dataset`
    spares preparing `config.data` again. `resume` goes on from the newest checkpoint in `out`, and returns the stored
    result of a run that has finished. `on_log` gets every line of metrics.jsonl.

    FileExistsError: `out` holds a run and `resume` is not set. FileNotFoundError: `resume`, and no run there.
    ValueError: model and tokenizer do not fit, or the run to be resumed had another configuration.
    TrainingInterrupted (a KeyboardInterrupt): SIGINT or SIGTERM came; run.json says so, and there is a checkpoint if
    the run makes any while training.
    """
    out = Path(out)
    if resume and (done := finished_result(out)) is not None and done.outcome == "finished":
        check_same_config(out, config)
        return done
    dataset = prepare(config.data) if dataset is None else dataset
    check_vocabulary(config, dataset)
    run = Run.build(config, out, dataset)
    checkpoint = open_run(out, config, resume)
    with StopSignals() as stop, torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
        state = initial_state(config, run.device)
        if checkpoint is not None:
            load_checkpoint(checkpoint, state, dataset.fingerprint)
        try:
            with MetricsLog(out, keep_through=state.step) as log:
                evaluation = train_steps(run, state, log, stop, on_log)
            return conclude(run, state, evaluation)
        except KeyboardInterrupt as interruption:
            write_result(run, state, "interrupted", str(interruption) or "interrupted")
            raise


def train_steps(
    run: Run, state: TrainState, log: MetricsLog, stop: StopSignals, on_log: OnLog | None = None
) -> Evaluation | None:
    """Train from `state.step` until the last step, divergence or a signal; returns the evaluation of the last step."""
    config, model = run.config, state.model.train()
    forward: Callable[..., Any] = model
    if wants_compile(config.compile, run.device):
        forward = compile_or_eager(model, lambda compiled: run.gradients(compiled, state.step))
    logged_step, logged_seconds = state.step, state.seconds

    for step in range(state.step, config.total_steps):
        started = time.perf_counter()
        lr = config.lr_at(step)
        loss = run.gradients(forward, step).item()
        grad_norm = clip_gradients(model.parameters(), config.grad_clip)
        update_parameters(state, lr, grad_norm)
        event = state.monitor.update(loss)
        state.step += 1
        state.seconds += time.perf_counter() - started

        lost = config.on_divergence == "stop" and divergence(state) is not None
        last = lost or state.step == config.total_steps
        evaluation = run.evaluate(state) if last or _due(state.step, config.eval_interval) else None
        if step == 0 or event or evaluation or _due(state.step, config.log_interval):
            speed = (state.step - logged_step) * config.tokens_per_step / (state.seconds - logged_seconds)
            logged_step, logged_seconds = state.step, state.seconds
            measured = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_s": speed}
            record = log_record(run, state, measured, evaluation, event)
            log.write(record)
            if on_log is not None:
                on_log(record)
        if _due(state.step, config.checkpoint_interval) or (stop.received and config.checkpoint_interval):
            save_checkpoint(run.out, state, config, run.dataset.fingerprint)
        if last:
            return evaluation
        stop.raise_if_received()
    return None


def conclude(run: Run, state: TrainState, evaluation: Evaluation | None) -> RunResult:
    """Evaluation where the last step had none, diagnostics, checkpoint, and run.json last of all."""
    evaluation = evaluation or run.evaluate(state)
    write_json(run.out / DIAGNOSTICS, run.probe(state))
    if run.config.save_final or run.config.checkpoint_interval > 0:
        save_checkpoint(run.out, state, run.config, run.dataset.fingerprint)
    reason = divergence(state, ended=True)
    return write_result(run, state, "finished" if reason is None else "diverged", reason, evaluation)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
