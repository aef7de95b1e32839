"""Errors that a user can act on become one line on stderr; everything else keeps its traceback."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UsageError(Exception):
    """A flag with a value that cannot be.

    Not a ValueError, which tyro would put into a box, broken at the width of the terminal.
    """


@contextmanager
def flags_checked() -> Iterator[None]:
    """Around the checks of a command's configuration: a ValueError becomes a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def explain(error: BaseException) -> str:
    """The message of an error; of the operating system's errors what went wrong and where."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__


def as_flags(message: str, command: Any) -> str:
    """`message` with the fields it mentions as the flags that were typed: 'n_embd = 30' becomes '--n-embd 30'."""
    for field in dataclasses.fields(command):
        message = re.sub(rf"(?<![\w-]){field.name} ?= ?(?=\S)", f"--{field.name.replace('_', '-')} ", message)
    return message
