"""Axis limits that one failed run cannot spoil."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

Limits = tuple[float, float]


def robust_limits(
    core: Sequence[float], others: Sequence[float] = (), *, reach: float = 4.0, pad: float = 0.06, widen: float = 0.5
) -> Limits:
    """Limits that show all of `core` and as much of `others` as does not squeeze it.

    Losses have a floor and no ceiling: a value is off the scale when it lies further above the best one than `reach`
    times the median excess of `core`, and than 2% of the best. `others` (interval ends, say) widen the limits by up to
    `widen` times the span of `core` each way.
    """
    if not core:
        return robust_limits(others, reach=reach, pad=pad, widen=widen) if others else (0.0, 1.0)
    best = min(core)
    ceiling = best + max(reach * median(x - best for x in core), 0.02 * abs(best))
    high = max(x for x in core if x <= ceiling)
    slack = max(widen * (high - best), 0.001 * abs(best), 1e-6)
    low_limit = max(min([best, *others]), best - slack)
    high_limit = min(max([high, *others]), high + slack)
    margin = pad * (high_limit - low_limit) or slack
    return low_limit - margin, high_limit + margin


def difference_limits(intervals: Sequence[Sequence[float]], *, reach: float = 3.0, pad: float = 0.06) -> Limits:
    """Limits around zero for differences, each given by its mean and, where there is one, the ends of its interval.

    All are shown whole, but for those that go further from zero than `reach` times the median of how far they go.
    """
    far = [max(map(abs, interval)) for interval in intervals]
    bound = reach * median(far) or 1e-6
    shown = [min(max(x, -bound), bound) for interval in intervals for x in interval]
    low, high = min(0.0, *shown), max(0.0, *shown)
    margin = pad * (high - low) or 1e-6
    return low - margin, high + margin
