"""Live view of a comparison: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from spheret.experiments.compare import Comparison
from spheret.experiments.runner import Active, Runner
from spheret.training import RunResult

PLAIN_SECONDS = 15.0


class View(Protocol):
    """What `compare` shows while it works."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def tick(self, state: Comparison, runner: Runner) -> None: ...


def view(console: Console) -> View:
    """A live table where there is a terminal, plain lines where there is none."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class Ended:
    """Finds the runs that have ended since it was last asked."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def lines(self, state: Comparison) -> list[str]:
        new = [spec for spec in state.ended if spec not in self._seen]
        self._seen.update(new)
        return [f"{spec.label}: {outcome(state.ended[spec])}" for spec in new]


def outcome(result: RunResult | None) -> str:
    """One run in a few words."""
    if result is None:
        return "crashed"
    loss = "no loss" if result.val_loss is None else f"val loss {result.val_loss:.4f}"
    note = f", {result.outcome}: {result.reason}" if result.outcome != "finished" else ""
    return loss + (", collapsed to the unigram plateau" if result.collapsed else "") + note


class Clock:
    """Estimates the time left from the steps done since this call of the program started."""

    def __init__(self) -> None:
        self.started, self.already = time.monotonic(), -1.0

    def left(self, state: Comparison, runner: Runner) -> float | None:
        """Seconds, None while there is nothing to go by."""
        steps = state.config.steps
        inside = sum(active.last_record().get("step", 0) / steps for active in runner.active)
        done = len(state.ended) + inside
        if self.already < 0:
            self.already = done  # runs reused from an earlier call took no time
        worked = done - self.already
        if worked < 0.2:
            return None
        return (time.monotonic() - self.started) * (state.total_runs - done) / worked


def duration(seconds: float | None) -> str:
    """75 -> 1m15s."""
    if seconds is None:
        return "--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


class PlainView:
    """One line when a run ends, and one line on the state of things every quarter of a minute."""

    def __init__(self, console: Console) -> None:
        self.console, self.ended, self.clock, self.last = console, Ended(), Clock(), time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def tick(self, state: Comparison, runner: Runner) -> None:
        for line in self.ended.lines(state):
            self._print(f"[{len(state.ended)}/{state.total_runs}] {line}")
        if time.monotonic() - self.last > PLAIN_SECONDS and runner.active:
            self.last = time.monotonic()
            running = "; ".join(_running(active, state.config.steps) for active in runner.active)
            self._print(
                f"{len(state.ended)}/{state.total_runs} runs, {duration(self.clock.left(state, runner))} left: {running}"
            )

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _running(active: Active, steps: int) -> str:
    record = active.last_record()
    loss = f", loss {record['loss']:.3f}" if record.get("loss") is not None else ""
    return f"{active.spec.label} step {record.get('step', 0)}/{steps}{loss}"


class LiveView:
    """Runs at work with step, loss, speed and time left, above one bar for the whole comparison."""

    def __init__(self, console: Console) -> None:
        self.console, self.ended, self.clock = console, Ended(), Clock()
        self.live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def tick(self, state: Comparison, runner: Runner) -> None:
        for line in self.ended.lines(state):
            self.live.console.print(f"[{len(state.ended)}/{state.total_runs}] {line}", markup=False, highlight=False)
        self.live.update(Group(self._table(state, runner), self._bar(state, runner)))

    def _table(self, state: Comparison, runner: Runner) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("run", "step", "loss", "val loss", "tokens/s", "left"):
            table.add_column(name, justify="left" if name == "run" else "right")
        for active in runner.active:
            record = active.last_record()
            step, speed = record.get("step", 0), record.get("tokens_per_s")
            tokens_left = (state.config.steps - step) * active.spec.config.tokens_per_step
            table.add_row(
                active.spec.label,
                f"{step}/{state.config.steps}",
                _number(record.get("loss"), ".3f"),
                _number(record.get("val_loss"), ".4f"),
                _number(speed, ",.0f"),
                duration(tokens_left / speed if speed else None),
            )
        return table

    def _bar(self, state: Comparison, runner: Runner) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=state.total_runs, completed=len(state.ended), width=30)
        text = f"{len(state.ended)}/{state.total_runs} runs, {len(runner.active)} at work, {duration(self.clock.left(state, runner))} left"
        line.add_row(bar, text)
        return line


def _number(value: float | None, form: str) -> str:
    return "--" if value is None else format(value, form)
