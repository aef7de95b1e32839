"""Runs in processes of their own, as many at a time as the cores allow; the parent reads their metrics and never shares memory.

A run that crashes takes nothing else with it; a run that has finished is not run again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from spheret.data import Dataset
from spheret.experiments.plan import RunSpec
from spheret.training import RunResult, train
from spheret.training.files import CONFIG, read_metrics
from spheret.training.folder import finished_result

POLL_SECONDS = 0.25
ERROR_FILE = "error.txt"


@dataclass
class Active:
    """A run that a process is working on."""

    spec: RunSpec
    process: BaseProcess
    started: float = field(default_factory=time.monotonic)

    def last_record(self) -> dict[str, Any]:
        """Newest line of its metrics, {} before the first."""
        records = read_metrics(self.spec.folder)
        return records[-1] if records else {}


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(device: str) -> int:
    """Runs at a time: one per core, or one on a GPU."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return 1 if on_gpu else cpu_cores()


class Runner:
    """Starts runs in the order given and reports each as it ends.

    Args:
        dataset: folder of the prepared data that every run reads.
        jobs: runs at a time.
        on_end: called with the spec and its result (None: the run crashed, its error text lies in the folder); it may `add` more runs.
        on_tick: called several times a second, for a display.
    """

    def __init__(
        self,
        dataset: Path,
        jobs: int,
        on_end: Callable[[RunSpec, RunResult | None], None],
        on_tick: Callable[[Runner], None] | None = None,
    ) -> None:
        self.dataset, self.jobs, self.on_end, self.on_tick = dataset, jobs, on_end, on_tick
        self.threads = max(1, cpu_cores() // jobs)
        self.waiting: list[RunSpec] = []
        self.active: list[Active] = []
        self._context = _process_context()

    def add(self, spec: RunSpec) -> None:
        self.waiting.append(spec)

    def run(self) -> None:
        """Work until nothing is left. KeyboardInterrupt stops the running processes, then goes on up."""
        try:
            while self.waiting or self.active:
                self._start()
                self._collect()
                if self.on_tick is not None:
                    self.on_tick(self)
                if self.active:
                    time.sleep(POLL_SECONDS)
        finally:
            self._stop()

    def _start(self) -> None:
        while self.waiting and len(self.active) < self.jobs:
            spec = self.waiting.pop(0)
            done = finished_result(spec.folder)
            if done is not None:
                self.on_end(spec, done)
                continue
            spec.folder.mkdir(parents=True, exist_ok=True)
            process = self._context.Process(
                target=_work, args=(spec, self.dataset, self.threads), name=spec.folder.name, daemon=True
            )
            process.start()
            self.active.append(Active(spec, process))

    def _collect(self) -> None:
        for active in [a for a in self.active if not a.process.is_alive()]:
            self.active.remove(active)
            active.process.join()
            result = finished_result(active.spec.folder)
            if result is None and not (active.spec.folder / ERROR_FILE).exists():
                text = f"the process ended with exit code {active.process.exitcode} before the run did\n"
                (active.spec.folder / ERROR_FILE).write_text(text, encoding="utf-8")
            self.on_end(active.spec, result)

    def _stop(self) -> None:
        for active in self.active:
            active.process.terminate()
        for active in self.active:
            active.process.join(timeout=20)
            if active.process.is_alive():
                active.process.kill()
        self.active.clear()


def _process_context() -> Any:
    """A server process that has imported the package once and forks from there: a run starts in milliseconds, without the parent's threads."""
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spheret.experiments.runner"])
    return context


def _work(spec: RunSpec, dataset: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    error = spec.folder / ERROR_FILE
    error.unlink(missing_ok=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            train(spec.config, spec.folder, dataset=Dataset.open(dataset), resume=(spec.folder / CONFIG).exists())
        if caught:
            (spec.folder / "warnings.txt").write_text("".join(f"{w.message}\n" for w in caught), encoding="utf-8")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        error.write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)
