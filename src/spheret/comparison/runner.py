"""Runs every run in its own process, by default as many at a time as there are cores.

The parent learns from the files of a run folder how its run went. A run that crashes takes no other run with it. A run
that has ended is not run again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from spheret.comparison.runs import RunSpec
from spheret.comparison.worker import ERROR_FILE, ended_result, explain_exit, work
from spheret.kernels import cpp
from spheret.training import RunResult
from spheret.training.interrupt import STOPPING, StopSignals
from spheret.training.run_folder import METRICS

POLL_SECONDS = 0.25  # also how often a display is refreshed
STOP_SECONDS = 20.0  # to finish a step after SIGTERM and write run.json; then the process is killed


class OnEnd(Protocol):
    """Called for every run that ends. `result` is None if it crashed; `reused` is true if it ended before this call."""

    def __call__(self, spec: RunSpec, result: RunResult | None, *, reused: bool) -> None: ...


@dataclass
class MetricsTail:
    """Follows a growing metrics.jsonl for a display; `latest` holds the newest value of every key.

    It reads only the new lines, which is cheap enough for several times a second. `read_metrics` reads a whole file.
    """

    path: Path
    latest: dict[str, Any] = field(default_factory=dict)
    _file: tuple[int, int] = (0, 0)  # inode and bytes read

    def poll(self) -> dict[str, Any]:
        """Read the new complete lines. A file that was replaced, as by a resumed run, is read from the start."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                inode, offset = self._file
                if inode != status.st_ino or status.st_size < offset:
                    self.latest, offset = {}, 0
                file.seek(offset)
                whole = file.read()
        except OSError:
            return self.latest
        whole = whole[: whole.rfind(b"\n") + 1]
        self._file = (status.st_ino, offset + len(whole))
        for line in whole.splitlines():
            self._take(line)
        return self.latest

    def _take(self, line: bytes) -> None:
        try:
            self.latest.update(json.loads(line))
        except (ValueError, TypeError):
            return  # not worth an error: this is for a display only


@dataclass
class Active:
    """A run in progress, with its process."""

    spec: RunSpec
    process: BaseProcess
    tail: MetricsTail

    def last_record(self) -> dict[str, Any]:
        """The newest value of every key of the run's metrics; {} before the first line."""
        return self.tail.poll()


def cpu_cores() -> int:
    """Cores that this process may use."""
    # cpu_count also counts cores that a container or a job scheduler keeps from this process.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(device: str) -> int:
    """Runs at a time: one per core, or one on a GPU."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return 1 if on_gpu else cpu_cores()


def threads_per_run(jobs: int) -> int:
    """Each run's share of the cores, at most OMP_NUM_THREADS if that is set."""
    # More threads than cores do not only share them: PyTorch's threads spin while they wait, and slow every run down.
    share = max(1, cpu_cores() // jobs)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(limit)) if limit.isdigit() and int(limit) > 0 else share


class Runner:
    """Starts runs in the order given and reports each as it ends.

    Args:
        dataset: folder of the prepared data that every run reads.
        jobs: runs at a time.
        on_end: called for every run that ends; it may `add` more runs.
        on_tick: called several times a second, for a display.
    """

    def __init__(
        self, dataset: Path, jobs: int, on_end: OnEnd, on_tick: Callable[[Runner], None] | None = None
    ) -> None:
        self.dataset, self.jobs, self.on_end, self.on_tick = dataset, jobs, on_end, on_tick
        self.threads = threads_per_run(jobs)
        self.waiting: list[RunSpec] = []
        self.active: list[Active] = []
        self._context = process_context()

    def add(self, spec: RunSpec) -> None:
        self.waiting.append(spec)

    def run(self) -> None:
        """Run until no run is left.

        SIGINT, SIGTERM, SIGHUP or a closed output stops the running processes between two of their steps, and then
        TrainingInterrupted (a KeyboardInterrupt) is raised. A second signal does not wait for them.
        """
        cpp.obstacle()  # compile the kernel here, once: the runs' own output, with its notice, goes to a file
        with StopSignals() as stop:
            try:
                while self.waiting or self.active:
                    self._start(stop)
                    self._tick(stop)
                    wait([active.process.sentinel for active in self.active], timeout=POLL_SECONDS)
                    stop.raise_if_received()
                    self._collect()
                self._tick(stop)
            finally:
                self._stop()

    def _tick(self, stop: StopSignals) -> None:
        if self.on_tick is not None:
            with stop.listening():
                self.on_tick(self)

    def _start(self, stop: StopSignals) -> None:
        while self.waiting and len(self.active) < self.jobs:
            stop.raise_if_received()
            spec = self.waiting.pop(0)
            done = ended_result(spec.folder)
            if done is not None:
                self.on_end(spec, done, reused=True)
                continue
            spec.folder.mkdir(parents=True, exist_ok=True)
            (spec.folder / ERROR_FILE).unlink(missing_ok=True)
            process = self._context.Process(
                target=work, args=(spec, self.dataset.absolute(), self.threads), name=spec.folder.name, daemon=True
            )
            # No signal may come between the start of a process and its entry in the list of those to be stopped.
            with _signals_blocked(), _caller_hidden():
                process.start()
                self.active.append(Active(spec, process, MetricsTail(spec.folder / METRICS)))
            self._tick(stop)

    def _collect(self) -> None:
        for active in [a for a in self.active if not a.process.is_alive()]:
            self.active.remove(active)
            active.process.join()
            result = ended_result(active.spec.folder)
            error = active.spec.folder / ERROR_FILE
            # A process that was killed could not write its reason. Its exit code is known only here.
            if result is None and not error.exists():
                error.write_text(explain_exit(active.spec.folder, active.process.exitcode) + "\n", encoding="utf-8")
            self.on_end(active.spec, result, reused=False)

    def _stop(self) -> None:
        processes = [active.process for active in self.active]
        try:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(timeout=STOP_SECONDS)
        finally:  # also after a second signal: the user does not want to wait
            for process in processes:
                if process.is_alive():
                    process.kill()
            self.active.clear()


def process_context() -> Any:
    """The multiprocessing context of the runs: a server process imports the package once and forks for every run.

    So a run starts at once. Forking this process instead would copy locks that its other threads may hold, but not the
    threads, and the run could wait forever.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch._dynamo, a second of work that the server does once for all runs.
    context.set_forkserver_preload(["spheret.comparison.worker", "torch._dynamo"])
    return context


@contextmanager
def _caller_hidden() -> Iterator[None]:
    """Keep a new process from importing the caller's script: without a main guard, that would start it once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that end a run. A terminal sends them to the whole process group; only the parent should act.

    The server and the runs inherit the mask.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
