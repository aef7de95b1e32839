"""The record of a benchmark, its table, and the comparison with an earlier record that finds regressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from spheret.training.device import machine, versions

FORMAT = 1
TABLE_HEADER = (
    "variant",
    "parameters",
    "ms",
    "p10 - p90",
    "tokens/s",
    "ratio",
    "p10 - p90",
    "memory",
    "moved",
    "of copy",
)


def record(
    kind: str,
    settings: Mapping[str, Any],
    device: torch.device,
    *,
    baseline: str,
    variants: Sequence[Mapping[str, Any]],
    **figures: Any,
) -> dict[str, Any]:
    """A benchmark's record, ready for JSON: what was timed, when, where, and the figures."""
    return {
        "format": FORMAT,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        # JSON has no tuples, and the record should equal the one that is read back from the file.
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
        "environment": {"versions": versions(), "machine": machine(device)},
        "baseline": baseline,
        **figures,
        "variants": list(variants),
    }


def timing(
    name: str,
    seconds: Sequence[float],
    baseline: Sequence[float],
    *,
    tokens: int,
    parameters: int,
    peak_bytes: int | None = None,
    moved_bytes: int | None = None,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """The record of one variant.

    It holds the seconds of every timed call and their ratios to the baseline's seconds in the same round, both with
    median, p10 and p90, and the tokens per second at the median. If the moved bytes are known, it also holds their
    speed as a share of ``bandwidth`` (bytes per second).
    """
    # The median of the ratios, not the ratio of the medians: a disturbance of a whole round cancels in its ratio.
    ratios = [own / base for own, base in zip(seconds, baseline, strict=True)]
    p10, median, p90 = _percentiles(seconds)
    ratio_p10, ratio, ratio_p90 = _percentiles(ratios)
    return {
        "variant": name,
        "parameters": parameters,
        "median_s": median,
        "p10_s": p10,
        "p90_s": p90,
        "tokens_per_s": tokens / median,
        "ratio": ratio,
        "ratio_p10": ratio_p10,
        "ratio_p90": ratio_p90,
        "peak_bytes": peak_bytes,
        "moved_bytes": moved_bytes,
        "bandwidth_share": moved_bytes / median / bandwidth if moved_bytes and bandwidth else None,
        "seconds": list(seconds),
        "ratios": ratios,
    }


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    p10, median, p90 = np.percentile(values, (10, 50, 90))
    return float(p10), float(median), float(p90)


def to_table(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of strings per variant, in the columns of ``TABLE_HEADER``."""
    return [
        (
            v["variant"],
            f"{v['parameters']:,}",
            f"{1e3 * v['median_s']:.2f}",
            f"{1e3 * v['p10_s']:.2f} - {1e3 * v['p90_s']:.2f}",
            f"{v['tokens_per_s']:,.0f}",
            f"{v['ratio']:.3f}",
            f"{v['ratio_p10']:.2f} - {v['ratio_p90']:.2f}",
            _mebibytes(v["peak_bytes"]),
            _mebibytes(v.get("moved_bytes")),
            "-" if v.get("bandwidth_share") is None else f"{v['bandwidth_share']:.0%}",
        )
        for v in result["variants"]
    ]


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class Regression:
    """A variant whose ratio to the baseline grew beyond the tolerance."""

    variant: str
    old_ratio: float
    new_ratio: float

    def __str__(self) -> str:
        change = 100 * (self.new_ratio / self.old_ratio - 1)
        return f"{self.variant}: {self.new_ratio:.3f} of the baseline's step, was {self.old_ratio:.3f} ({change:+.0f}%)"


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float = 0.15) -> list[Regression]:
    """The variants of `old` whose median ratio is larger in `new` by more than `tolerance` (a fraction).

    Ratios carry over between machines of one kind, so results are comparable if shape, precision, compilation and kind
    of device agree. ValueError: they do not agree, or `new` lacks a variant of `old`.
    """
    # Settings on which the ratio of a variant does not depend.
    free = ("schemes", "rounds", "warmup", "seed")
    settings = [{k: v for k, v in result["settings"].items() if k not in free} for result in (old, new)]
    # A switch that is absent from the older result did not exist yet, so it was off.
    one, other = ({k: v or None for k, v in chosen.items()} for chosen in settings)
    differing = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
    if differing:
        pairs = ", ".join(f"{k} {settings[0].get(k)} and {settings[1].get(k)}" for k in differing)
        raise ValueError(f"the two results are not comparable: {pairs}; run the benchmark again with the old settings")
    ratios = [{v["variant"]: v["ratio"] for v in result["variants"]} for result in (old, new)]
    if missing := [name for name in ratios[0] if name not in ratios[1]]:
        raise ValueError(f"the new result lacks {', '.join(missing)}; add it to the benchmark's schemes")
    found = [Regression(name, ratio, ratios[1][name]) for name, ratio in ratios[0].items()]
    return [r for r in found if r.new_ratio > r.old_ratio * (1 + tolerance)]
