"""The main job: several schemes under the same data and budget, each at its own best learning rate, with error bars.

The learning rate is chosen on a seed that is not reported: the best of several noisy runs looks better than it is, and
the more rates a scheme may try, the more it would gain from that.
"""

from __future__ import annotations

import errno
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spheret.comparison.reach import Curve, rates_that_train, with_to_baseline
from spheret.comparison.runner import Runner, default_jobs, threads_per_run
from spheret.comparison.runs import (
    RESULTS_NAME,
    TUNING_SEED,
    CompareConfig,
    RunSpec,
    parse_sweep,
    seed_runs,
    tuning_runs,
)
from spheret.comparison.statistics import all_pairs, summarise
from spheret.comparison.verdict import verdict
from spheret.comparison.worker import WARNINGS_FILE, explain_exit
from spheret.costs.cost import training_flops
from spheret.data import Dataset, fixed_windows, prepare, sample_batch
from spheret.training import RunResult, machine, versions
from spheret.training.device import resolve_device
from spheret.training.run_folder import read_json, read_metrics, write_json
from spheret.training.state import check_buildable


class ComparisonBusy(RuntimeError):
    """Another process is running a comparison in the same folder."""


class Comparison:
    """One comparison while it runs: which runs have ended, and which runs follow from them."""

    def __init__(self, config: CompareConfig, dataset: Dataset) -> None:
        self.config, self.dataset = config, dataset
        self.ended: dict[RunSpec, RunResult | None] = {}
        self.reused: set[RunSpec] = set()
        self.best_lr: dict[str, float] = {}
        self.untunable: set[str] = set()
        self._curves: dict[RunSpec, Curve] = {}
        self._flops: dict[str, int] = {}
        self.jobs = max(1, min(config.jobs or default_jobs(config.device), self.total_runs))

    @property
    def total_runs(self) -> int:
        """Runs of the whole comparison. A scheme whose tuning runs all crash has no seed runs."""
        return self.config.total_runs - self.config.seeds * len(self.untunable)

    def first_runs(self) -> list[RunSpec]:
        """The tuning runs of every scheme, or the seed runs if there is one learning rate and so nothing to tune."""
        tuning = [spec for scheme in self.config.names for spec in tuning_runs(self.config, scheme, *self._data)]
        return tuning or [
            spec for scheme in self.config.names for spec in self._seeds(scheme, self.config.rates(scheme)[0])
        ]

    def record(self, spec: RunSpec, result: RunResult | None, *, reused: bool = False) -> list[RunSpec]:
        """Record a run that ended (None: it crashed); returns the runs that can start now."""
        self.ended[spec] = result
        if reused:
            self.reused.add(spec)
        if spec.purpose == "seed":
            return []
        tuned = self._of(spec.scheme, "tuning")
        if len(tuned) < len(self.config.lrs):
            return []
        if all(r is None for r in tuned.values()):  # its seed runs would crash too
            self.untunable.add(spec.scheme)
            return []
        return self._seeds(spec.scheme, best_rate(tuned))

    def _seeds(self, scheme: str, lr: float) -> list[RunSpec]:
        self.best_lr[scheme] = lr
        return list(seed_runs(self.config, scheme, lr, *self._data))

    def _of(self, scheme: str, purpose: str) -> dict[RunSpec, RunResult | None]:
        return {s: r for s, r in self.ended.items() if s.scheme == scheme and s.purpose == purpose}

    @property
    def _data(self) -> tuple[int, str]:
        return self.dataset.tokenizer.vocab_size, self.dataset.fingerprint

    @property
    def failed(self) -> list[RunSpec]:
        """The runs that crashed."""
        return [spec for spec, result in self.ended.items() if result is None]

    def results(self) -> dict[str, Any]:
        """The content of results.json."""
        config = self.config
        entries = [self._entry(scheme) for scheme in config.names]
        any_result = next((r for r in self.ended.values() if r is not None), None)
        results: dict[str, Any] = {
            "format": 1,
            "command": config.command(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": self._settings(),
            "environment": {
                "versions": versions(),
                # The threads of a run, not those of this process.
                "machine": machine(resolve_device(config.device)) | {"threads": threads_per_run(self.jobs)},
            },
            "data": self.dataset.summary() | {"unigram_loss": None if any_result is None else any_result.unigram_loss},
            "sweep": _sweep_record(config.sweep),
            "schemes": with_to_baseline(summarise(entries), self._all_curves(), config.batch_size * config.block_size),
        }
        if config.all_pairs:
            results["all_pairs"] = all_pairs(results["schemes"])
        results["verdict"] = verdict(results) + self._incomplete()
        return results

    def _incomplete(self) -> str:
        if len(self.ended) - len(self.failed) == self.total_runs:
            return ""
        crashed = f", {len(self.failed)} of them crashed" if self.failed else ""
        ended = f"{len(self.ended)} of {self.total_runs} runs have ended{crashed}"
        return f"\nNote: This comparison is not complete: {ended}. Run the same command again to finish it."

    def _settings(self) -> dict[str, Any]:
        config = self.config
        # What all runs share, read from the configuration of one. Schemes may differ in warm-up, weight decay and
        # bounds on learning rates, so `_entry` records these once more for each scheme.
        run = config.train_config(
            config.names[0], lr=config.rates(config.names[0])[0], seed=1, vocab_size=self.dataset.tokenizer.vocab_size
        )
        model = {
            k: getattr(run.model, k)
            for k in (
                *("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout", "init"),
                *("positions", "mlp", "qk_norm", "head"),
            )
        }
        return {
            "steps": run.total_steps,
            "lrs": list(config.lrs),
            "seeds": list(range(1, config.seeds + 1)),
            "tuning_seed": TUNING_SEED if len(config.lrs) > 1 else None,
            "batch_size": config.batch_size,
            "grad_accum": config.grad_accum,
            "jobs": self.jobs,
            "tokens_per_run": run.total_steps * run.tokens_per_step,
            "schedule": config.schedule,
            "min_lr_ratio": config.min_lr_ratio,
            "decay_fraction": config.decay_fraction if config.schedule == "wsd" else None,
            "warmup_steps": run.total_warmup_steps,
            "weight_decay": run.weight_decay,
            "qkv_lr": run.qkv_lr,
            "mlp_out_lr": run.mlp_out_lr,
            "betas": [config.beta1, config.beta2],
            "grad_clip": config.grad_clip,
            "eval_windows": config.eval_windows,
            "dtype": config.dtype,
            "compile": config.compile,
            "model": model,
            "data": {
                "data": list(config.data),
                "tokenizer": config.tokenizer,
                "text_column": config.text_column,
                "val_fraction": config.val_fraction,
            },
        }

    def _entry(self, scheme: str) -> dict[str, Any]:
        lr = self.best_lr.get(scheme)
        rates = sorted(self.config.rates(scheme))
        tuning, runs = self._of(scheme, "tuning"), self._of(scheme, "seed")
        results = [r for r in (*runs.values(), *tuning.values()) if r is not None]
        run = self.config.train_config(scheme, lr=rates[0], seed=1, vocab_size=self.dataset.tokenizer.vocab_size)
        if scheme not in self._flops:  # building the model takes a while, and this is called after every run
            self._flops[scheme] = training_flops(run.model)
        entry = {
            "scheme": scheme,
            "rates": rates,
            "warmup_steps": run.total_warmup_steps,
            "weight_decay": run.weight_decay,
            "qkv_lr": run.qkv_lr,
            "mlp_out_lr": run.mlp_out_lr,
            "parameters": results[0].parameters if results else None,
            "flops_per_token": self._flops[scheme],
            "lr": lr,
            "lr_at_edge": len(rates) > 1 and lr in (rates[0], rates[-1]),
            "tuning": [self._run(s, r) for s, r in sorted(tuning.items(), key=lambda item: item[0].lr)],
            "runs": [self._run(s, r) for s, r in sorted(runs.items(), key=lambda item: item[0].seed)],
        }
        trains = rates_that_train(entry)
        return entry | {"trains": None if trains is None else asdict(trains)}

    def _all_curves(self) -> dict[str, list[Curve]]:
        """The validation curves of the reported runs that finished, by scheme."""
        curves: dict[str, list[Curve]] = {scheme: [] for scheme in self.config.names}
        for spec, result in self.ended.items():
            if spec.purpose != "seed" or result is None or result.outcome != "finished" or result.val_loss is None:
                continue
            if spec not in self._curves:  # a finished run no longer changes
                records = read_metrics(spec.folder, skip_damaged=True)
                evaluated = [r for r in records if r.get("val_loss") is not None and r.get("tokens") is not None]
                self._curves[spec] = [(r["tokens"], r["val_loss"]) for r in evaluated]
            curves[spec.scheme].append(self._curves[spec])
        return curves

    def _run(self, spec: RunSpec, result: RunResult | None) -> dict[str, Any]:
        where = {"seed": spec.seed, "lr": spec.lr, "run": str(spec.folder.relative_to(self.config.out))}
        if result is None:
            reason = f"crashed: {explain_exit(spec.folder, None)}"
            return where | {"outcome": "interrupted", "reason": reason, "val_loss": None}
        return where | {
            "outcome": result.outcome,
            "reason": result.reason,
            "collapsed": result.collapsed,
            "last_loss": result.last_loss,
            "last_loss_step": result.last_loss_step,
            "val_loss": result.val_loss,
            "val_se": result.val_se,
            "val_bpb": result.val_bpb,
        }


def _sweep_record(text: str | None) -> dict[str, Any] | None:
    """The sweep as results.json has it, with lists: it is the same before it is written and when it is read."""
    if text is None:
        return None
    sweep = parse_sweep(text)
    values, names = list(sweep.values), list(sweep.names)
    return {"scheme": sweep.scheme, "option": sweep.option, "values": values, "names": names}


def best_rate(tuned: dict[RunSpec, RunResult | None]) -> float:
    """Learning rate with the lowest validation loss among the runs that finished; the smallest rate if none did."""

    def loss(result: RunResult | None) -> float:
        usable = result is not None and result.outcome == "finished" and result.val_loss is not None
        return result.val_loss if usable else math.inf  # type: ignore[union-attr,return-value]

    return min(tuned, key=lambda spec: (loss(tuned[spec]), spec.lr)).lr


def compare(
    config: CompareConfig,
    *,
    on_prepare: Callable[[str], None] | None = None,
    on_tick: Callable[[Comparison, Runner], None] | None = None,
    on_replace: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the missing runs of a comparison and write ``results.json`` into ``config.out``; returns its content.

    Runs that have ended are reused, so the same call continues after an interruption. Results are written whenever a
    run ends, so an interrupted comparison can be reported too. Before the results of another comparison in the folder
    are replaced, ``on_replace`` gets the command of that one. Its runs are kept.

    Raises:
        ValueError, FileNotFoundError: the settings or the data allow no run; nothing has been trained.
        OSError: the folder cannot be written.
        ComparisonBusy: another process is running a comparison in the same folder.
        TrainingInterrupted (a KeyboardInterrupt): a signal came. The running processes have been stopped, and the
            results so far have been written.
    """
    # Before the corpus is prepared, which may take much longer than finding out that a scheme cannot be built.
    for scheme in config.names:
        check_buildable(config.train_config(scheme, lr=config.rates(scheme)[0], seed=1, vocab_size=1))
    with _only_here(config.out):
        dataset = prepare(config.data_config, progress=on_prepare)
        _check_length(config, dataset)
        if on_replace is not None and (command := _other_command(config, dataset.fingerprint)) is not None:
            on_replace(command)
        return _compare(Comparison(config, dataset), on_tick)


def _compare(state: Comparison, on_tick: Callable[[Comparison, Runner], None] | None) -> dict[str, Any]:
    def save() -> dict[str, Any]:
        results = state.results()
        write_json(state.config.out / RESULTS_NAME, results)
        return results

    def on_end(spec: RunSpec, result: RunResult | None, *, reused: bool) -> None:
        for following in state.record(spec, result, reused=reused):
            runner.add(following)
        if not reused:
            save()

    tick = None if on_tick is None else lambda runner: on_tick(state, runner)
    runner = Runner(state.dataset.path, state.jobs, on_end, tick)
    for spec in state.first_runs():
        runner.add(spec)
    try:
        runner.run()
    finally:
        results = save()
    return results


@contextmanager
def _only_here(out: Path) -> Iterator[None]:
    """Make the folder and hold its lock. Errors of the file system name the folder."""
    lock = FileLock(out / ".lock", timeout=0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ComparisonBusy(f"another comparison is running in {out}: wait for it, or choose another --out") from None
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror or error}): choose another --out") from error
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(f"no space left for {out}: make room, then run the same command again") from error
    finally:
        lock.release()


def _other_command(config: CompareConfig, fingerprint: str) -> str | None:
    """The command of another comparison whose results are in the folder; None if there is none, or it is unreadable."""
    try:
        found = read_json(config.out / RESULTS_NAME)
        command, stored = str(found["command"]), found["data"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = stored == fingerprint and _without_paths(command) == _without_paths(config.command())
    return None if same else command


def _without_paths(command: str) -> list[str]:
    """The words of a command without --data, --tokenizer and --out: a path has many spellings, a fingerprint one.

    Nor does --all-pairs make another comparison.
    """
    kept, keep = [], True
    for word in shlex.split(command):
        if word.startswith("--"):
            keep = word not in ("--data", "--tokenizer", "--out", "--all-pairs")
        if keep:
            kept.append(word)
    return kept


def _check_length(config: CompareConfig, dataset: Dataset) -> None:
    """ValueError: the text is too short for one window. Checked once here, because otherwise every run would fail."""
    fixed_windows(dataset.val, n_windows=1, block_size=config.block_size)
    sample_batch(dataset.train, batch_size=1, block_size=config.block_size, seed=0, step=0)


def failures(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Every run that crashed: its folder, relative to the comparison's, and the reason."""
    runs = [run for entry in results["schemes"] for run in (*entry["tuning"], *entry["runs"])]
    return [(run["run"], run["reason"]) for run in runs if (run["reason"] or "").startswith("crashed")]


def warnings_of(results: dict[str, Any], out: Path) -> dict[str, int]:
    """The warnings of the runs, each with the number of runs that gave it."""
    counts: dict[str, int] = {}
    for entry in results["schemes"]:
        for run in (*entry["tuning"], *entry["runs"]):
            file = out / run["run"] / WARNINGS_FILE
            for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
                counts[line] = counts.get(line, 0) + 1
    return counts
