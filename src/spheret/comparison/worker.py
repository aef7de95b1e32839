"""The process of one run, and the files from which its parent learns how the run went.

Only the parent stops a run: by SIGTERM, or by ending, which a thread here waits for. Ctrl-C, which a terminal sends to
every process, is blocked in a worker.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock

from spheret.comparison.runs import RunSpec
from spheret.data import Dataset
from spheret.training import DamagedCheckpoint, RunResult, checkpoints, read_metrics, train
from spheret.training.run_folder import LOCK, RUN, check_same_config, finished_result, free_name

ERROR_FILE, WARNINGS_FILE, OUTPUT_FILE = "error.txt", "warnings.txt", "output.txt"
LOCK_FILE = ".lock"
"""Held by the process of a run, also while it tidies the folder. `train` holds another lock, which does not wait."""
ASIDE = "earlier"
"""Subfolder for what an earlier run left, if it holds checkpoints."""
ORPHAN_SECONDS = 60.0
"""Longest time that a run takes to stop after its parent ended. A new run in the same folder waits twice as long."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors that reading a file may raise if a crash damaged it."""


def work(spec: RunSpec, dataset: Path, threads: int) -> None:
    """Train the run in its folder, then exit: 0 when it ended, 130 when stopped, 1 after an error (error.txt)."""
    _obey_parent()
    torch.set_num_threads(threads)
    try:
        # A run whose parent was killed may still be stopping in this folder.
        with FileLock(spec.folder / LOCK_FILE, timeout=2 * ORPHAN_SECONDS):
            _keep_output(spec.folder)
            with warnings_kept(spec.folder):
                resume = _tidy(spec)
                data = Dataset.open(dataset)
                try:
                    train(spec.config, spec.folder, dataset=data, resume=resume)
                except DamagedCheckpoint as error:  # none is whole: a comparison can train the run again
                    warnings.warn(f"{error}. The run starts over", stacklevel=1)
                    _clear(spec.folder)
                    train(spec.config, spec.folder, dataset=data)
            _drop_empty_output(spec.folder)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        (spec.folder / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)


def ended_result(folder: Path) -> RunResult | None:
    """The result of a run that ended by itself, else None. Also None if a crash left run.json unreadable."""
    try:
        return finished_result(folder)
    except UNREADABLE:
        return None


def explain_exit(folder: Path, code: int | None) -> str:
    """Why a run has no result, in one line: its own error, else the exit code of its process in words."""
    try:
        lines = (folder / ERROR_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if lines:
        return lines[-1]
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "; if memory ran out, use fewer --jobs" if name == "SIGKILL" else ""
        return f"its process was killed by {name} (exit code {code}){hint}"
    return f"its process ended with exit code {code} before the run did"


@contextmanager
def warnings_kept(folder: Path) -> Iterator[None]:
    """Write the warnings of the run to a file, each one once, even if the run fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            yield
        finally:
            if lines := dict.fromkeys(" ".join(str(w.message).split()) for w in caught):
                (folder / WARNINGS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tidy(spec: RunSpec) -> bool:
    """Whether the run can continue from a checkpoint. If not, its folder is cleared of what a crash left there."""
    # An unfinished or damaged run.json. With a finished one, this process would not have been started.
    (spec.folder / RUN).unlink(missing_ok=True)
    if _resumable(spec):
        return True
    _clear(spec.folder)
    return False


def _clear(folder: Path) -> None:
    """Make room for a run from step 0. Checkpoints are never deleted: all that was there moves into a subfolder."""
    content = [p for p in folder.iterdir() if p.name not in (LOCK_FILE, LOCK, OUTPUT_FILE) and not _is_aside(p)]
    if checkpoints(folder):
        aside = free_name(folder / ASIDE)
        aside.mkdir()
        for path in content:
            os.replace(path, aside / path.name)
        warnings.warn(f"{folder} held checkpoints that the run cannot continue from; they are in {aside}", stacklevel=2)
        return
    for path in content:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_aside(path: Path) -> bool:
    return path.is_dir() and path.name.startswith(ASIDE)


def _resumable(spec: RunSpec) -> bool:
    try:
        check_same_config(spec.folder, spec.config)
        read_metrics(spec.folder)
    except UNREADABLE:
        return False
    return bool(checkpoints(spec.folder))


def _obey_parent() -> None:
    # The runner starts this process with the signals of STOPPING blocked. All but SIGTERM stay so: Ctrl-C and the end
    # of the terminal are the parent's.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_stop_with_parent, daemon=True).start()


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # stops the run between two steps, as if the parent had sent it
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)  # sys.exit would end only this thread


def _keep_output(folder: Path) -> None:
    """Send what libraries print to a file: on the terminal it would break the parent's display."""
    # The descriptors and not sys.stdout, because C and C++ libraries write to the descriptors.
    file = os.open(folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _drop_empty_output(folder: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if not (folder / OUTPUT_FILE).stat().st_size:
        (folder / OUTPUT_FILE).unlink()
