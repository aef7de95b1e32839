"""Ctrl-C, SIGTERM, a terminal that closes (SIGHUP) and a reader that goes away (SIGPIPE) end a run between two steps.

So it leaves a complete folder."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that end a run. Windows has no SIGHUP."""
OUTPUT_GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe that nobody reads any more, and to a terminal that was closed."""


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended the run; its run folder is complete and run.json has the outcome `interrupted`.

    `exit_code` is 128 + signal number, as in a shell. The class is a KeyboardInterrupt, so that `except Exception`
    around `train` does not swallow Ctrl-C.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number


class StopSignals:
    """Context that only notes the first signal of STOPPING; a second one raises at once.

    Python allows signal handlers in the main thread only. In any other thread the context does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def raise_if_received(self) -> None:
        """Raise TrainingInterrupted if a signal has arrived. Call it where stopping is safe."""
        if self.received is not None:
            raise TrainingInterrupted(self.received)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around code that prints: output that nobody can read any more counts as a signal, here SIGPIPE."""
        try:
            yield
        except OSError as error:
            if error.errno not in OUTPUT_GONE:
                raise
            # Python ignores the signal itself and raises an error instead, wherever it is just then.
            self.received = self.received or int(getattr(signal, "SIGPIPE", signal.SIGTERM))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # a second Ctrl-C: the user does not want to wait for the end of the step
            raise TrainingInterrupted(number)
        self.received = number

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:  # as nohup wants it
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
