"""The files of a run folder: atomic JSON, the growing metrics.jsonl, and readers that bear a half-written last line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

CONFIG, METRICS, RUN, DIAGNOSTICS = "config.json", "metrics.jsonl", "run.json", "diagnostics.json"


def finite_or_none(value: Any) -> Any:
    """Copy of a JSON-like value in which every NaN and infinity is None: strict JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON so that a reader sees the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(finite_or_none(value), indent=2, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Read a JSON file. FileNotFoundError: names the file and what would have written it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no {path.name} in {path.parent}; is it the folder of a run? Train into it with `spheret train --out`"
        ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, [] without the file; a last line that a kill cut short is passed over."""
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


class MetricsLog:
    """Appends one JSON object a line to metrics.jsonl, each line on disk before `write` returns.

    Lines of steps after `keep_through` are removed on opening, so that a resumed run has no step twice.
    """

    def __init__(self, folder: Path, keep_through: int = 0) -> None:
        path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] <= keep_through]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_none(record), allow_nan=False) + "\n"
