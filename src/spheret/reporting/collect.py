"""Reading a comparison back from its folder: results.json and the run folders it names."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS_NAME = "results.json"


@dataclass(frozen=True)
class RunFolder:
    """What one run left behind; `metrics` is sorted by step, one record a step."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    outcome: dict[str, Any]
    diagnostics: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """results.json with the run folders it names, by the relative path that results.json gives."""

    folder: Path
    results: dict[str, Any]
    runs: dict[str, RunFolder] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def load_results(folder: Path) -> dict[str, Any]:
    """results.json of a comparison; numbers that are not finite become None.

    Raises FileNotFoundError where there is none, ValueError where it is not the results of a comparison.
    """
    path = folder / RESULTS_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"no {RESULTS_NAME} in {folder}: give the folder that `spheret compare --out` wrote; if the comparison was "
            "interrupted, run the same command again"
        )
    results = _read_json(path)
    if results.get("format") != 1 or not isinstance(results.get("schemes"), list):
        raise ValueError(
            f"{path} has format {results.get('format')!r}; this spheret reads format 1 with a list of schemes"
        )
    return results


def load_run(folder: Path) -> RunFolder:
    """One run folder; files that the run never came to write are empty. Raises FileNotFoundError naming the folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"run folder {folder} is missing: restore it, or report without it (partial=True)")
    return RunFolder(
        path=folder,
        config=_read_json_if_present(folder / "config.json"),
        metrics=read_metrics(folder / "metrics.jsonl"),
        outcome=_read_json_if_present(folder / "run.json"),
        diagnostics=_read_json_if_present(folder / "diagnostics.json"),
    )


def load_comparison(folder: Path, *, partial: bool = False) -> Comparison:
    """results.json and the folders of the runs behind its means (not of the tuning runs).

    Raises FileNotFoundError naming a run folder that is missing, unless `partial`: then it is listed in `missing`.
    """
    folder = Path(folder)
    results = load_results(folder)
    names = [run["run"] for entry in results["schemes"] for run in entry["runs"] if run.get("run")]
    missing = tuple(name for name in names if not (folder / name).is_dir())
    if missing and not partial:
        raise FileNotFoundError(
            f"{folder / RESULTS_NAME} names run folders that are missing: {', '.join(missing)}; restore them, or "
            "build the report without them (partial=True)"
        )
    runs = {name: load_run(folder / name) for name in names if name not in missing}
    return Comparison(folder=folder, results=results, runs=runs, missing=missing)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of metrics.jsonl by step; empty where the file is absent.

    A run that was killed may leave half a last line, which is dropped. A run that was resumed writes some steps again:
    the later record counts. A broken line elsewhere is left out with a warning.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _finite(json.loads(line))
            by_step[int(record["step"])] = record
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                warnings.warn(f"{path}:{number} is not a metrics record; left out", stacklevel=2)
    return [by_step[step] for step in sorted(by_step)]


def _read_json_if_present(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = _finite(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); was it cut short? write it again or remove it"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; was it overwritten?")
    return value


def _finite(value: Any) -> Any:
    """`value` with every NaN and infinity, at any depth, replaced by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
