"""Output of the commands: text on stdout, and an error that a user can act on as one line."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

LOG_WIDTH = 120
"""Columns if there is no terminal: wide enough for the whole table of a comparison in a log."""

# --- text ---


def output() -> Console:
    """stdout, as wide as the terminal (or as the variable COLUMNS); 120 columns in a pipe or a file."""
    width = None if is_terminal() or os.environ.get("COLUMNS") else LOG_WIDTH
    return _Console(width=width, highlight=False)


class _Console(Console):
    """Raises BrokenPipeError if nobody reads the output, where rich would end the process without a trace."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def end_output() -> None:
    """Send what is still to be written to nowhere: at its end, Python would fail on a pipe that nobody reads."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def replace_unencodable() -> None:
    """Let stdout and stderr write '?' for a character that their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not so under a test, or in a notebook
            stream.reconfigure(errors="replace")


def is_terminal() -> bool:
    """Whether stdout can redraw lines. Colours may be forced on a pipe; redrawing cannot."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say(console: Console, text: str = "", style: str = "", *, to_copy: bool = False) -> None:
    """Print text without markup.

    On a terminal, long lines break between words, unless the text is meant `to_copy`. A pipe gets unbroken lines.
    """
    # Without markup, because rich would take square brackets, such as those of an interval, for its own tags.
    console.print(text, style=style, markup=False, soft_wrap=to_copy or not is_terminal())


def say_hanging(console: Console, start: str, text: str, style: str = "") -> None:
    """Print ``text`` after ``start``, wrapped at the console's width; further lines are indented by ``start``."""
    lines = textwrap.wrap(
        text,
        max(console.width, len(start) + 20),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )
    say(console, "\n".join(lines) or start.rstrip(), style, to_copy=True)


def duration(seconds: float | None) -> str:
    """75 -> 1m15s; None -> --."""
    if seconds is None:
        return "--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


# --- errors ---


class UsageError(Exception):
    """A flag with a value that cannot be used.

    Not a ValueError: tyro would put that into a box, broken at the width of the terminal.
    """


@contextmanager
def flags_checked() -> Iterator[None]:
    """For the checks of a command's configuration: turns a ValueError into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def explain(error: BaseException) -> str:
    """The message of an error. For an error of the operating system: what went wrong, and the file."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__


def as_flags(message: str, command: Any) -> str:
    """`message` with field names written as flags: 'n_embd = 30' becomes '--n-embd 30'."""
    # Configurations are also used from Python, so their own messages name fields and not flags.
    for field in dataclasses.fields(command):
        name = rf"(?<![\w.-])(?:model\.|data\.)?{field.name}"
        message = re.sub(rf"{name} ?= ?(?=\S)", f"--{field.name.replace('_', '-')} ", message)
    return message
