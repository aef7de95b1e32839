"""Following runs, dividing the cores, and saying why a process ended."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

import spheret
from spheret.comparison.runner import MetricsTail, cpu_cores, process_context, threads_per_run
from spheret.comparison.worker import ERROR_FILE, ended_result, explain_exit


def test_the_tail_of_metrics_takes_whole_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.poll() == {}
    path.write_text('{"step": 1, "loss": 3.0, "val_loss": 4.0}\n{"step": 2, "lo')
    assert tail.poll() == {"step": 1, "loss": 3.0, "val_loss": 4.0}
    with path.open("a") as file:
        file.write('ss": 2.5}\nnonsense\n{"step": 3, "loss": 2.0}\n')
    assert tail.poll() == {"step": 3, "loss": 2.0, "val_loss": 4.0}, "the last evaluation stays"


def test_the_tail_starts_over_when_a_resumed_run_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9, "val_loss": 1.0}\n')
    tail = MetricsTail(path)
    tail.poll()
    (tmp_path / "new").write_text('{"step": 1}\n')
    os.replace(tmp_path / "new", path)
    assert tail.poll() == {"step": 1}


def test_the_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_run(1) == cpu_cores() and threads_per_run(10**6) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_run(1) == 1


def test_an_exit_is_explained(tmp_path: Path) -> None:
    assert "SIGKILL (exit code -9); if memory ran out, use fewer --jobs" in explain_exit(tmp_path, -9)
    assert "exit code 3" in explain_exit(tmp_path, 3)
    (tmp_path / ERROR_FILE).write_text("Traceback ...\n  somewhere\nValueError: the cause\n")
    assert explain_exit(tmp_path, 1) == "ValueError: the cause"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"outcome": "finished", "final": 3}', "\0" * 9])
def test_a_damaged_result_counts_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    assert ended_result(tmp_path) is None


def test_every_module_that_the_server_preloads_exists() -> None:
    """The server passes over a name that it cannot import, and every run then imports or misses what it stands for."""
    if sys.platform == "win32":
        pytest.skip("no server there")
    context = process_context()
    preloaded = [name for name in forkserver._forkserver._preload_modules if name != "__main__"]
    assert preloaded and all(importlib.util.find_spec(name) for name in preloaded)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert set(preloaded) <= set(pool.submit(loaded_modules).result())


def loaded_modules() -> list[str]:
    return list(sys.modules)


def test_a_worker_runs_the_kernels_of_the_benchmarks() -> None:
    """The server forks the runs. They must not fall back, neither to other code nor to one thread."""
    h, f = torch.randn(700, 96), torch.randn(700, 96)
    with ProcessPoolExecutor(1, mp_context=process_context()) as pool:
        theirs = pool.submit(spheret.which_backend, h, f).result()
        result = pool.submit(spheret.retract, h, f, alpha=0.7).result()
    assert theirs == spheret.which_backend(h, f)
    assert torch.equal(result, spheret.retract(h, f, alpha=0.7))


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    """The runs do not import the script that started them."""
    (tmp_path / "text.txt").write_text("the norm of a sphere\n" * 400)
    (tmp_path / "script.py").write_text(
        "from spheret.comparison.compare import compare\n"
        "from spheret.comparison.runs import CompareConfig\n"
        "print('started', flush=True)\n"
        "results = compare(CompareConfig(schemes=('pre-ln',), lrs=(0.01,), seeds=1, steps=2, n_layer=1, n_head=1,\n"
        "    n_embd=16, block_size=16, batch_size=2, eval_windows=2, device='cpu', data=('text.txt',), out='out'))\n"
        "print([run['outcome'] for run in results['schemes'][0]['runs']])\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["started", "['finished']"], done.stderr
