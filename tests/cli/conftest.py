"""The `spheret` command on a tiny corpus: in this process, and in processes that can be stopped and killed."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spheret.cli.main import main

SOURCE = Path(__file__).resolve().parents[2] / "src"
WORDS = ["the", "norm", "of", "a", "sphere", "turns", "by", "an", "angle", "beta", "over", "p"]
TINY = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 2 --eval-windows 4 --device cpu"
PATIENCE = 120.0
"""Seconds after which something that should have happened never will; no test waits that long where all is well."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(20):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(200)))
    return folder


@pytest.fixture(scope="session")
def cache(new_cache: Callable[[], Path]) -> Path:
    return new_cache()


@pytest.fixture
def tiny(corpus: Path) -> list[str]:
    """Flags of the smallest model and corpus."""
    return [*TINY.split(), "--data", str(corpus)]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    """An empty current folder, and a cache of our own."""
    monkeypatch.setenv("SPHERET_CACHE", str(cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def spheret(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """spheret("schemes proj", *more) -> exit code, stdout, stderr."""

    def call(command: str, *more: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*shlex.split(command), *more])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start("compare --out x", *more) -> a process that leads a group; what it prints goes to the files out and err."""
    begun: list[subprocess.Popen[str]] = []

    def launch(command: str, *more: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "spheret", *shlex.split(command), *more]
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            begun.append(subprocess.Popen(words, stdout=out, stderr=err, text=True, start_new_session=True))
        return begun[-1]

    yield launch
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.wait()
    for orphan in users(tmp_path):  # only where a test has failed
        os.kill(orphan, signal.SIGKILL)


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}")


def users(folder: Path) -> list[int]:
    """Processes that hold a file of a run below `folder` open: its workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(f"{folder}/") and "/runs/" in link for link in links):
            found.append(int(process.name))
    return found


def losses(out: Path) -> dict[tuple[str, str, int], float]:
    """Validation loss of every run of results.json by scheme, kind and seed or learning rate."""
    found = {}
    for entry in json.loads((out / "results.json").read_text())["schemes"]:
        for kind in ("tuning", "runs"):
            for run in entry[kind]:
                found[entry["scheme"], f"{kind} {run['lr']}", run["seed"]] = run["val_loss"]
    return found
