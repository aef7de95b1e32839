"""Reads a comparison back from its folder, results.json and the run folders that it names, or a single run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spheret.comparison.runs import RESULTS_NAME
from spheret.comparison.statistics import has_finished
from spheret.training.run_folder import CONFIG, DIAGNOSTICS, RUN, read_json, read_metrics


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; `metrics` is sorted by step, one record per step."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    outcome: dict[str, Any]
    diagnostics: dict[str, Any]


@dataclass(frozen=True)
class ComparisonFolder:
    """results.json, and the run folders that it names, keyed by their relative paths."""

    folder: Path
    results: dict[str, Any]
    runs: dict[str, RunFolder] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def has_seeds(self) -> bool:
        """Whether a scheme was run with several seeds."""
        return any(len(entry["runs"]) > 1 for entry in self.results["schemes"])

    def finished(self, entry: Mapping[str, Any]) -> list[RunFolder]:
        """The folders of the runs of `entry`, a scheme of the results, that finished."""
        named = [run["run"] for run in entry["runs"] if has_finished(run)]
        return [self.runs[name] for name in named if name in self.runs]


def load_results(folder: Path) -> dict[str, Any]:
    """results.json of a comparison; numbers that are not finite become None.

    Raises FileNotFoundError if there is none, ValueError if it does not hold the results of a comparison.
    """
    path = folder / RESULTS_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"no {RESULTS_NAME} in {folder}: give the folder that `spheret compare --out` wrote; if the comparison was "
            "interrupted, run the same command again"
        )
    results = read_json(path)
    if results.get("format") != 1 or not isinstance(results.get("schemes"), list):
        raise ValueError(
            f"{path} has format {results.get('format')!r}; this release reads format 1 with a list of schemes"
        )
    return results


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a single run.

    Raises FileNotFoundError if it is neither that nor the folder of a comparison.
    """
    names = (RESULTS_NAME, CONFIG)
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(
            f"no {' and no '.join(names)} in {folder}: give the folder that `spheret compare --out` or "
            "`spheret train --out` wrote; if a comparison was interrupted, run the same command again"
        )
    return RESULTS_NAME not in found


def load_run(folder: Path) -> RunFolder:
    """One run folder; files that the run did not write are empty.

    Raises FileNotFoundError, naming the folder, if it is missing.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"run folder {folder} is missing: restore it, or report without it (partial=True)")
    config, outcome, diagnostics = (
        read_json(folder / name) if (folder / name).is_file() else {} for name in (CONFIG, RUN, DIAGNOSTICS)
    )
    # A report with a gap in one curve is better than no report.
    metrics = read_metrics(folder, skip_damaged=True)
    return RunFolder(path=folder, config=config, metrics=metrics, outcome=outcome, diagnostics=diagnostics)


def load_comparison(folder: Path, *, partial: bool = False) -> ComparisonFolder:
    """results.json and the folders of its reported runs (not of its tuning runs).

    Raises FileNotFoundError, naming the run folders, if any are missing. With `partial`, they are listed in `missing`
    instead.
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
    return ComparisonFolder(folder=folder, results=results, runs=runs, missing=missing)
