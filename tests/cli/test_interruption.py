"""`spheret compare` stopped, killed and started again, in real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from spheret.cli.compare import CompareCommand
from spheret.comparison.compare import compare

from .conftest import losses, until, users

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the workers of a run through /proc")

SCHEMES = "--schemes pre-ln proj --lrs 1e-3 1e-2 --seeds 1"


def text(name: str) -> str:
    return Path(name).read_text()


def run_files(out: Path, name: str) -> list[Path]:
    return sorted(out.glob(f"runs/*/{name}"))


def test_after_ctrl_c_the_printed_command_finishes_the_comparison(
    start: Any, spheret: Any, tiny: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    process = start(f"compare {SCHEMES} --steps 150 --jobs 1 --out {out}", *tiny)
    until(lambda: run_files(out, "run.json") and len(run_files(out, "metrics.jsonl")) > 1, "a second run at work")
    os.killpg(process.pid, signal.SIGINT)

    assert process.wait() == 130
    assert not users(out)
    assert "Traceback" not in text("err") + text("out")
    for file in (*run_files(out, "*.json"), out / "results.json"):
        json.loads(file.read_text())
    assert "not complete" in json.loads((out / "results.json").read_text())["verdict"]
    ended = {f: f.stat().st_mtime_ns for f in run_files(out, "run.json") if '"interrupted"' not in f.read_text()}
    assert 0 < len(ended) < 6
    command = next(line for line in text("out").splitlines() if line.startswith("  spheret compare"))

    code, printed, _ = spheret(command.strip().removeprefix("spheret "))
    assert code == 0
    assert [int(n) for n in re.findall(r"^\[(\d+)/6\]", printed, re.MULTILINE)] == [1, 2, 3, 4, 5, 6]
    assert printed.count("(reused)") == len(ended)
    assert {f: f.stat().st_mtime_ns for f in ended} == ended
    assert (out / "report.html").exists()

    straight = tmp_path / "straight"
    words = [*SCHEMES.split(), "--steps", "150", "--out", str(straight), *tiny]
    compare(tyro.cli(CompareCommand, args=words))  # without another report
    assert losses(out) == losses(straight)


def test_sigterm_stops_the_runs_and_leaves_the_terminal_as_it_was(tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    controller, terminal = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "spheret",
        "compare",
        *SCHEMES.split(),
        "--steps",
        "100000",
        "--out",
        str(out),
        *tiny,
    ]
    xterm = {**os.environ, "TERM": "xterm"}  # what a terminal is called where the tests run says nothing of this one
    process = subprocess.Popen(words, stdout=terminal, stderr=terminal, start_new_session=True, env=xterm)
    os.close(terminal)
    shown = b""

    def read() -> bool:
        """Whether there is more to come."""
        nonlocal shown
        try:
            shown += (news := os.read(controller, 65536))
        except OSError:  # the process is gone
            return False
        return bool(news)

    until(
        lambda: not read() or (run_files(out, "metrics.jsonl") and b"/100000" in shown), "runs at work on the terminal"
    )
    process.terminate()
    while read():
        pass
    process.wait()
    assert process.returncode == 143
    assert not users(out)
    assert b"\x1b[?25l" in shown and shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is hidden"
    assert {json.loads(f.read_text())["outcome"] for f in run_files(out, "run.json")} == {"interrupted"}
    os.close(controller)


def test_a_killed_run_is_named_and_done_again(start: Any, spheret: Any, tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = f"compare --schemes pre-ln --lrs 1e-2 --seeds 3 --steps 400 --jobs 1 --out {out}"
    process = start(command, *tiny)
    until(lambda: run_files(out, "metrics.jsonl"), "a run at work")
    victim = run_files(out, "metrics.jsonl")[0].parent
    os.kill(users(out)[0], signal.SIGKILL)

    assert process.wait() == 1
    assert victim.name in text("err") and "SIGKILL (exit code -9)" in text("err")
    runs = json.loads((out / "results.json").read_text())["schemes"][0]["runs"]
    assert [run["outcome"] for run in runs] == ["interrupted", "finished", "finished"]
    assert runs[0]["reason"].startswith("crashed")

    code, printed, err = spheret(command, *tiny)
    assert code == 0 and not err
    assert printed.count("(reused)") == 2
    assert all(
        run["outcome"] == "finished" for run in json.loads((out / "results.json").read_text())["schemes"][0]["runs"]
    )


def test_runs_do_not_outlive_a_killed_parent(start: Any, tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "orphans"
    process = start(f"compare {SCHEMES} --steps 1000000 --out {out}", *tiny)
    until(lambda: run_files(out, "metrics.jsonl") and users(out), "runs at work")
    process.kill()
    process.wait()
    until(lambda: not users(out), "the end of the orphans")
    stopped = [json.loads(f.read_text()) for f in run_files(out, "run.json")]
    assert stopped and {run["outcome"] for run in stopped} == {"interrupted"}


@pytest.mark.parametrize("command", ["train --log-interval 1 --out out", f"compare {SCHEMES} --out out"])
def test_a_pipe_that_nobody_reads_stops_the_command_like_ctrl_c(command: str, tiny: list[str], spheret: Any) -> None:
    words = [sys.executable, "-m", "spheret", *command.split(), "--steps", "100000", *tiny]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **streams, start_new_session=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for _ in range(2):
                process.stdout.readline()
            process.stdout.close()  # as `| head -2` does
            assert process.wait(timeout=60) == 128 + signal.SIGPIPE
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
    outcomes = {json.loads(file.read_text())["outcome"] for file in Path("out").rglob("run.json")}
    assert outcomes <= {"interrupted"}  # a comparison may not have started a run yet
    if command.startswith("train"):
        assert outcomes
        assert list(Path("out/checkpoints").glob("step_*"))


@pytest.mark.parametrize("command", ["train --log-interval 1", f"compare {SCHEMES}"])
def test_the_end_of_the_terminal_stops_the_command_like_ctrl_c(command: str, tiny: list[str], tmp_path: Path) -> None:
    """The terminal is closed: SIGHUP goes to the whole group, and what is printed from then on fails."""
    out = tmp_path / "stopped"
    pid, controller = pty.fork()
    if pid == 0:  # the leader of a session on the new terminal
        words = [sys.executable, "-m", "spheret", *command.split(), "--steps", "100000", "--out", str(out), *tiny]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execvp(words[0], words)
    until(lambda: os.read(controller, 65536) and list(out.rglob("metrics.jsonl")), "a run at work")
    os.close(controller)
    _, status = until(lambda: (found := os.waitpid(pid, os.WNOHANG)) and found[0] and found, "the end of the command")
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert not users(out)
    stopped = [json.loads(file.read_text()) for file in out.rglob("run.json")]
    assert stopped and {run["outcome"] for run in stopped} == {"interrupted"}
