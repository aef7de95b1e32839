"""Progress of a comparison: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from spheret.cli.console import duration, is_terminal, say
from spheret.comparison.compare import Comparison
from spheret.comparison.runner import Active, Runner
from spheret.comparison.runs import RunSpec
from spheret.training import RunResult

FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
"""Time until the first plain status line, and the longest time between two later ones."""
SHOWN = 4
"""The most runs that a plain line names."""
NARROW = 88
"""On a terminal with fewer columns, the live table omits tokens/s."""


class View(Protocol):
    """What `compare` shows while it works."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def tick(self, state: Comparison, runner: Runner) -> None: ...


def view(console: Console) -> View:
    """A live table on a terminal, plain lines elsewhere."""
    return LiveView(console) if is_terminal() else PlainView(console)


class Ended:
    """Finds and numbers the runs that have ended since the last call."""

    def __init__(self) -> None:
        self._seen: set[RunSpec] = set()

    def lines(self, state: Comparison) -> Iterator[str]:
        for spec, result in list(state.ended.items()):
            if spec not in self._seen:
                self._seen.add(spec)
                note = " (reused)" if spec in state.reused else ""
                yield f"[{len(self._seen)}/{state.total_runs}] {spec.label}: {outcome(result)}{note}"


def outcome(result: RunResult | None) -> str:
    """The outcome of one run in a few words."""
    if result is None:
        return "crashed"
    loss = "no loss" if result.val_loss is None else f"val loss {result.val_loss:.4f}"
    note = f", {result.outcome}: {result.explanation}" if result.outcome != "finished" else ""
    return loss + (", collapsed to the unigram plateau" if result.collapsed else "") + note


class Clock:
    """Estimates the time left from the steps done since this process began to train."""

    def __init__(self) -> None:
        self._started: float | None = None

    def left(self, state: Comparison, runner: Runner) -> float | None:
        """Seconds left; None while too little is done for an estimate."""
        if self._started is None:
            self._started = time.monotonic()
        inside = sum(_step(active) / state.config.steps for active in runner.active)
        worked = len(state.ended) - len(state.reused) + inside  # in runs; reused ones took no time
        remaining = state.total_runs - len(state.ended) - inside
        if worked < 0.1:
            return None
        return (time.monotonic() - self._started) * remaining / worked


class PlainView:
    """One line when a run ends, and a status line from time to time."""

    def __init__(self, console: Console) -> None:
        self.console, self.ended, self.clock = console, Ended(), Clock()
        self._started: float | None = None
        self._next = FIRST_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def tick(self, state: Comparison, runner: Runner) -> None:
        left = self.clock.left(state, runner)
        for line in self.ended.lines(state):
            say(self.console, line)
        if not runner.active:
            return
        if self._started is None:
            self._started = time.monotonic()
            say(self.console, f"training {at_a_time(runner)}")
        passed = time.monotonic() - self._started
        if passed >= self._next:
            # Less often the longer it takes, so that a log of hours stays short.
            self._next = passed + min(MOST_SECONDS, max(FIRST_SECONDS, passed / 20))
            running = "; ".join(_running(active, state.config.steps) for active in runner.active[:SHOWN])
            done = f"{len(state.ended)}/{state.total_runs} runs done, {duration(left)} left; now"
            say(self.console, f"{done} {running}" + ("; ..." if len(runner.active) > SHOWN else ""))


def at_a_time(runner: Runner) -> str:
    """'2 runs at a time, 1 thread each'."""
    runs, threads = "s" * (runner.jobs > 1), "s" * (runner.threads > 1)
    return f"{runner.jobs} run{runs} at a time, {runner.threads} thread{threads} each"


def _running(active: Active, steps: int) -> str:
    loss = active.last_record().get("loss")
    return f"{active.spec.label} step {_step(active)}/{steps}" + (f" loss {loss:.3f}" if loss is not None else "")


def _step(active: Active) -> int:
    return int(active.last_record().get("step", 0))


class LiveView:
    """The active runs with step, loss, speed and time left, above one bar for the whole comparison."""

    def __init__(self, console: Console) -> None:
        self.console, self.ended, self.clock = console, Ended(), Clock()
        self.live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a terminal that was closed takes no cursor back
            self.live.stop()

    def tick(self, state: Comparison, runner: Runner) -> None:
        # Live hides the cursor, so start it only when there is something to show: a signal before that leaves the
        # terminal as it was.
        if not self.live.is_started:
            self.live.start()
        for line in self.ended.lines(state):
            say(self.live.console, line)
        self.live.update(Group(self._table(state, runner), self._bar(state, runner)))

    def _table(self, state: Comparison, runner: Runner) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        wide = self.console.width >= NARROW
        for name in ("run", "step", "loss", "val loss", *(("tokens/s",) if wide else ()), "left"):
            first = name == "run"
            table.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
        for active in runner.active:
            record = active.last_record()
            step, speed = _step(active), record.get("tokens_per_s")
            tokens_left = (state.config.steps - step) * active.spec.config.tokens_per_step
            table.add_row(
                active.spec.label,
                f"{step}/{state.config.steps}",
                _number(record.get("loss"), ".3f"),
                _number(record.get("val_loss"), ".4f"),
                *((_number(speed, ",.0f"),) if wide else ()),
                duration(tokens_left / speed if speed else None),
            )
        return table

    def _bar(self, state: Comparison, runner: Runner) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=state.total_runs, completed=len(state.ended), width=20)
        left = duration(self.clock.left(state, runner))
        line.add_row(bar, f"{len(state.ended)}/{state.total_runs} runs, {len(runner.active)} running, {left} left")
        return line


def _number(value: float | None, form: str) -> str:
    return "--" if value is None else format(value, form)
