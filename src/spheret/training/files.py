"""The files of a run folder: the one reader and the one atomic writer for them.

JSON here is strict: a NaN or an infinity is written, and read, as null.
"""

from __future__ import annotations

import json
import math
import os
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

CONFIG, METRICS, RUN, DIAGNOSTICS = "config.json", "metrics.jsonl", "run.json", "diagnostics.json"


def write_bytes(path: Path, payload: bytes) -> None:
    """Write a file so that a reader sees the old file or the whole new one, never a part."""
    # Beside its place, because a rename is atomic only within one file system. The name is unique, because several
    # threads or machines may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.write_bytes(payload)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for text, as UTF-8 with the line ends as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` for a JSON value, NaN and infinity as null."""
    write_text(path, json.dumps(finite_or_none(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; NaN and infinity become None.

    FileNotFoundError: names the file and, for a file of a run, what writes it. ValueError: names the file and what is
    wrong in it.
    """
    try:
        value = finite_or_none(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        hint = "is it the folder of a run? Train into it with `spheret train --out`"
        known = path.name in (CONFIG, RUN, DIAGNOSTICS)
        raise FileNotFoundError(f"no {path.name} in {path.parent}{'; ' + hint if known else ''}") from None
    except ValueError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); was it cut short? Write it again or remove it"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; was it overwritten?")
    return value


def finite_or_none(value: Any) -> Any:
    """Copy of a JSON value in which every NaN and infinity, at any depth, is None: strict JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value


def read_metrics(folder: Path, *, skip_damaged: bool = False) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl in order of step, [] where there is no file.

    A last line that a kill cut short is ignored. Where a step was written twice, the later record counts.

    ValueError: names another line that is no record. With `skip_damaged` that is a warning, and the line is omitted.
    """
    path = Path(folder) / METRICS
    if not path.is_file():
        return []
    # The last piece is "", or a line without its end: cut short, or just being written.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = finite_or_none(json.loads(line))
            by_step[int(record["step"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue
            message = f"{path}:{number} is not a metrics record"
            if not skip_damaged:
                raise ValueError(f"{message}; remove that line, or train again") from error
            warnings.warn(f"{message}; omitted", stacklevel=2)
    return [by_step[step] for step in sorted(by_step)]


class MetricsLog:
    """Appends one JSON object a line to metrics.jsonl; other processes see each line when `write` returns.

    Opening removes the lines of steps after `keep_through`: a resumed run does those steps again.
    """

    def __init__(self, folder: Path, keep_through: int = 0) -> None:
        kept = [record for record in read_metrics(folder) if record["step"] <= keep_through]
        write_text(folder / METRICS, "".join(_line(record) for record in kept))
        self._file = (folder / METRICS).open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_none(record), allow_nan=False) + "\n"
