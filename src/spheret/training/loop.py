"""Training one model, from the configuration to run.json. Nothing here depends on the scheme.

`train` sets up the run, `train_steps` is the loop, `conclude` ends the run. `Run` holds what stays constant, and
`TrainState` holds what changes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spheret.data import Dataset, prepare, sample_batch, settled
from spheret.diagnostics import Event, probe
from spheret.evaluation import Evaluation, Validation
from spheret.training.checkpoint import load_weights, resume_state, save_checkpoint, weights_folder
from spheret.training.collapse import has_collapsed
from spheret.training.config import TrainConfig
from spheret.training.device import (
    autocast,
    machine,
    resolve_device,
    resolve_dtype,
    to_device,
    versions,
    warn_if_slow,
)
from spheret.training.interrupt import StopSignals
from spheret.training.run_folder import (
    DIAGNOSTICS,
    RUN,
    MetricsLog,
    Outcome,
    RunResult,
    check_free,
    check_same_config,
    check_same_data,
    checkpoints,
    finished_result,
    only_trainer,
    open_run,
    read_metrics,
    require_run,
    write_json,
)
from spheret.training.state import TrainState, check_buildable, initial_state
from spheret.training.step import (
    Forward,
    accumulate_gradients,
    clip_gradients,
    compile_or_eager,
    divergence,
    update_parameters,
    wants_compile,
)

OnLog = Callable[[dict[str, Any]], None]
OnResume = Callable[[Path], None]

PROBE_WINDOWS = 4
"""Validation windows for the diagnostics: means over this many tokens are steady enough."""
TRACKED = ("alpha", "p", "angle_deg", "saturation", "skip_gain")
"""Diagnostics that metrics.jsonl has at every evaluation, one list each with an entry per connection."""


class Measured(NamedTuple):
    """What an evaluation finds: the validation loss, and the diagnostics of every connection."""

    evaluation: Evaluation
    diagnostics: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The constant part of a run: configuration, run folder, data, device and autocast context."""

    config: TrainConfig
    folder: Path
    dataset: Dataset
    device: torch.device
    precision: AbstractContextManager[object]
    validation: Validation

    @classmethod
    def build(cls, config: TrainConfig, folder: Path, dataset: Dataset) -> Run:
        """Build a run; writes no file. ValueError: the device is missing, or the data does not fit the model."""
        needed = dataset.tokenizer.vocab_size
        if config.model.vocab_size < needed:  # a larger vocabulary is allowed: a multiple of 64 is faster on GPUs
            raise ValueError(
                f"model.vocab_size={config.model.vocab_size} is too small for tokenizer {dataset.tokenizer.name!r}; "
                f"use {needed} or more"
            )
        device = resolve_device(config.device)
        warn_if_slow(config.dtype, device)
        # Building it reads all of the training shard; that a training id is out of range shows there too.
        validation = Validation.build(
            dataset,
            n_windows=config.eval_windows,
            block_size=config.model.block_size,
            # The size of a training micro-batch: what fits into memory in training fits here too.
            batch_size=-(-config.batch_size // config.grad_accum),
        )
        dataset.val.check_ids(validation.x.reshape(-1))
        return cls(config, folder, dataset, device, autocast(device, resolve_dtype(config.dtype, device)), validation)

    def gradients(self, forward: Forward, step: int) -> torch.Tensor:
        """Add the gradients of step number `step` to the parameters' .grad; returns the training loss, a scalar."""
        config = self.config
        # The batch is a function of seed and step alone, so a resumed run sees the batches it would have seen.
        x, y = sample_batch(
            self.dataset.train,
            batch_size=config.batch_size,
            block_size=config.model.block_size,
            seed=config.seed,
            step=step,
        )
        return accumulate_gradients(
            forward, x, y, micro_batches=config.grad_accum, device=self.device, context=self.precision
        )

    def evaluate(self, state: TrainState) -> Evaluation:
        """The loss on the validation windows."""
        with self.precision:
            return self.validation.evaluate(state.model)

    def probe(self, state: TrainState) -> dict[str, Any]:
        """The diagnostics of every connection on the first validation windows."""
        with self.precision:
            return dict(probe(state.model, to_device(self.validation.x[:PROBE_WINDOWS], self.device)))

    def measure(self, state: TrainState) -> Measured:
        """The loss and the diagnostics of one state."""
        return Measured(self.evaluate(state), self.probe(state))


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    dataset: Dataset | None = None,
    resume: bool = False,
    on_log: OnLog | None = None,
    on_resume: OnResume | None = None,
) -> RunResult:
    """Train one model into the run folder `out`: config.json, metrics.jsonl, checkpoints/, diagnostics.json, run.json.

    On a CPU the result depends only on `config` and the data. The caller's random state does not change.

    Args:
        config: the whole run.
        out: folder of the run; made if it does not exist.
        dataset: `config.data`, already prepared.
        resume: continue from the newest whole checkpoint in `out`. The stored result of a finished run is returned,
            unless `config` has more steps.
        on_log: gets every record of metrics.jsonl, once it is written.
        on_resume: gets the checkpoint from which the run continues, once it is loaded.

    Raises:
        FileExistsError: `out` holds a run and `resume` is not set.
        FileNotFoundError: `resume` is set and there is no run.
        ValueError: model and tokenizer do not fit, the run to resume had another configuration, or a launcher started
            several ranks.
        DamagedCheckpoint (a ValueError): the run to resume has checkpoints, but none that is whole.
        RunBusy: another process is training into `out`.
        TrainingInterrupted: SIGINT, SIGTERM or SIGHUP came, or what `on_log` writes to is closed (it is a
            KeyboardInterrupt). run.json says so, and there is a checkpoint if `config.checkpoint_interval` is set.
    """
    if out == "":  # Path("") is the current folder
        raise ValueError("out = '' names no folder: give the folder of the run, or . for the current one")
    out = Path(out)
    check_buildable(config)  # before the corpus is prepared, which may take long
    config = replace(config, data=settled(config.data))
    done = finished_result(out) if resume else None
    finished = done is not None and done.outcome == "finished"
    if finished:
        check_same_config(out, config)
    dataset = prepare(config.data) if dataset is None else dataset
    if done is not None and finished:
        check_same_data(out, dataset.fingerprint)
        if config.total_steps == done.step:
            return done
        if not checkpoints(out):
            raise ValueError(f"the run in {out} has finished and holds no checkpoint to continue from; train it again")
    # Everything that can be refused is refused before `open_run` writes.
    run = Run.build(config, out, dataset)
    if resume:
        require_run(out)
    with (
        only_trainer(out),
        StopSignals() as stop,
        torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []),
    ):
        check_free(out, config, resume)
        state = initial_state(config, run.device)
        # A run that was killed before its first checkpoint has none, and starts at step 0.
        checkpoint = resume_state(out, state, dataset.fingerprint) if resume else None
        if checkpoint is None and config.init_from:
            load_weights(state.model, weights_folder(Path(config.init_from)))
        open_run(out, config)
        if checkpoint is not None and on_resume is not None:
            with stop.listening():
                on_resume(checkpoint)
        try:
            with MetricsLog(out, keep_through=state.step) as log:
                ending = train_steps(run, state, log, stop, on_log)
            return conclude(run, state, ending)
        except KeyboardInterrupt as interruption:
            write_result(run, state, "interrupted", str(interruption) or "interrupted")
            raise


def train_steps(
    run: Run, state: TrainState, log: MetricsLog, stop: StopSignals, on_log: OnLog | None = None
) -> Measured | None:
    """Train from `state.step` to the last step, divergence or a signal; returns what was measured after the last."""
    config, model = run.config, state.model.train()
    forward: Forward = model
    if wants_compile(config.compile, run.device):
        forward = compile_or_eager(model, lambda compiled: run.gradients(compiled, state.step))
    logged_step, logged_seconds = state.step, state.seconds

    for step in range(state.step, config.total_steps):
        started = time.perf_counter()
        lr = config.lr_at(step)
        loss = run.gradients(forward, step).item()  # .item() also waits for the GPU, so the measured time is right
        grad_norm = clip_gradients(model.parameters(), config.grad_clip)
        update_parameters(state, lr, grad_norm)
        event = state.monitor.update(loss)
        state.step += 1
        state.note_loss(loss)
        state.seconds += time.perf_counter() - started

        lost = config.on_divergence == "stop" and divergence(state) is not None
        last = lost or state.step == config.total_steps
        measured = run.measure(state) if last or _due(state.step, config.eval_interval) else None
        # The first step is always logged, so that a progress display has something to show at once.
        if step == 0 or event or measured or _due(state.step, config.log_interval):
            speed = (state.step - logged_step) * config.tokens_per_step / (state.seconds - logged_seconds)
            logged_step, logged_seconds = state.step, state.seconds
            trained = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_s": speed}
            record = metrics_record(run, state, trained, measured, event)
            log.write(record)
            if on_log is not None:
                with stop.listening():
                    on_log(record)
        # A signal saves what was trained, but only in a run that saves at all.
        if _due(state.step, config.checkpoint_interval) or (stop.received and config.checkpoint_interval):
            save_checkpoint(run.folder, state, config, run.dataset.fingerprint)
        if last:
            return measured
        stop.raise_if_received()
    # Reached only by a run that was resumed after its last step.
    return None


def conclude(run: Run, state: TrainState, measured: Measured | None) -> RunResult:
    """Write diagnostics, checkpoint and, last, run.json; measure first if `measured` is None."""
    evaluation, diagnostics = measured or run.measure(state)
    write_json(run.folder / DIAGNOSTICS, diagnostics)
    if run.config.save_final or run.config.checkpoint_interval > 0:
        save_checkpoint(run.folder, state, run.config, run.dataset.fingerprint)
    # run.json comes last, because its presence marks the run folder as complete.
    reason = divergence(state, ended=True)
    outcome: Outcome = "finished" if reason is None else "diverged"
    return write_result(run, state, outcome, reason, evaluation, diagnostics["token_cosine"][-1])


def metrics_record(
    run: Run, state: TrainState, trained: dict[str, float], measured: Measured | None, event: Event | None
) -> dict[str, Any]:
    """One record of metrics.jsonl: counters, `trained`, and what was measured and the event if there are any."""
    record: dict[str, Any] = {
        "step": state.step,
        "tokens": state.step * run.config.tokens_per_step,
        **trained,
        "elapsed_s": state.seconds,
        "skipped": state.skipped,
    }
    if event is not None:
        record |= {"event": event.kind, "event_message": event.message}
    if measured is None:
        return record
    connections = {key: measured.diagnostics[key] for key in TRACKED if key in measured.diagnostics}
    return record | _evaluation_record(measured.evaluation) | {"connections": connections}


def write_result(
    run: Run,
    state: TrainState,
    outcome: Outcome,
    reason: str | None,
    evaluation: Evaluation | None = None,
    token_cosine: float | None = None,
) -> RunResult:
    """Write run.json and return the result. Without `evaluation`, the last one in metrics.jsonl is used.

    `token_cosine` is that of the last sublayer; without it, only the loss tells whether the run collapsed.
    """
    records = read_metrics(run.folder)
    evaluated = [record for record in records if "val_loss" in record]
    values: dict[str, Any] = evaluated[-1] if evaluated else {}
    if evaluation is not None:
        values = {"step": state.step, **_evaluation_record(evaluation)}
    # The first record covers the step that warmed up the caches.
    speeds = [record["tokens_per_s"] for record in (records[1:] or records)]
    val_loss = _finite(values.get("val_loss"))
    unigram_loss = run.validation.unigram_loss
    result = RunResult(
        folder=run.folder,
        outcome=outcome,
        reason=reason,
        step=state.step,
        tokens=state.step * run.config.tokens_per_step,
        val_loss=val_loss,
        val_se=_finite(values.get("val_se")),
        val_bpb=_finite(values.get("val_bpb")),
        train_loss=_finite(state.monitor.smoothed),
        val_step=None if val_loss is None else values["step"],
        last_loss=state.last_loss,
        last_loss_step=state.last_loss_step,
        unigram_loss=unigram_loss,
        parameters=sum(p.numel() for p in state.model.parameters()),
        tokens_per_s=statistics.median(speeds) if speeds else None,
        seconds=state.seconds,
        spikes=state.monitor.spikes,
        skipped_steps=state.skipped,
        collapsed=outcome == "finished" and has_collapsed(val_loss, unigram_loss, records, token_cosine),
    )
    environment = {"versions": versions(), "machine": machine(run.device), "data": run.dataset.summary()}
    write_json(run.folder / RUN, {**result.to_dict(), **environment})
    return result


def _evaluation_record(evaluation: Evaluation | None) -> dict[str, Any]:
    if evaluation is None:
        return {}
    return {"val_loss": evaluation.loss, "val_se": evaluation.standard_error, "val_bpb": evaluation.bits_per_byte}


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
