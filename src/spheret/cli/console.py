"""Where commands print."""

from __future__ import annotations

import os
import sys
import textwrap

from rich.console import Console

LOG_WIDTH = 120
"""Columns where there is no terminal to ask, wide enough for the whole table in a log."""


def output() -> Console:
    """stdout: as wide as the terminal (or as COLUMNS says), 120 columns in a pipe or a file."""
    width = None if is_terminal() or os.environ.get("COLUMNS") else LOG_WIDTH
    return Console(width=width, highlight=False)


def is_terminal() -> bool:
    """Whether stdout is a terminal that can redraw lines; colours may be forced on a pipe, redrawing not."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say(console: Console, text: str = "", style: str = "", *, to_copy: bool = False) -> None:
    """Prints text without markup.

    A terminal gets its lines broken between words, unless they are `to_copy`; a pipe gets them whole.
    """
    console.print(text, style=style, markup=False, soft_wrap=to_copy or not is_terminal())


def say_hanging(console: Console, start: str, text: str, style: str = "") -> None:
    """``text`` behind ``start``, broken between words at the console's width, further lines below the first."""
    lines = textwrap.wrap(
        text,
        max(console.width, len(start) + 20),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )
    say(console, "\n".join(lines) or start.rstrip(), style, to_copy=True)
