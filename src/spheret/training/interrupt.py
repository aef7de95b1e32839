"""Ctrl-C and SIGTERM end a run between two steps, so that its run folder is complete."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended the run; its run folder is complete and run.json has the outcome `interrupted`.

    `exit_code` is 128 + signal number, as in a shell. The class is a KeyboardInterrupt, so that `except Exception`
    around `train` does not swallow Ctrl-C.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number


class StopSignals:
    """Context that only records the first SIGINT or SIGTERM; a second one raises TrainingInterrupted at once.

    Python allows signal handlers in the main thread only. In any other thread the context does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def raise_if_received(self) -> None:
        """Raise TrainingInterrupted if a signal has arrived. Call it where stopping is safe."""
        if self.received is not None:
            raise TrainingInterrupted(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # a second Ctrl-C: the user does not want to wait for the end of the step
            raise TrainingInterrupted(number)
        self.received = number

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
