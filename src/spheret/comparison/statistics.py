"""What a comparison may claim: means, paired differences, and which of them are more than luck.

Every interval is a 95% Student t interval over seeds. Schemes are compared in pairs of runs with the same seed, and so
the same order of data: the variation that both runs share cancels. Runs that diverged are counted and named, but never
averaged. Runs that collapsed to the unigram plateau did finish, so they are named and also averaged, here and in every
figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, Literal

CONFIDENCE = 0.95
Call = Literal["better", "worse", "unclear", "unknown"]


@dataclass(frozen=True)
class MeanEstimate:
    """Mean over seeds with its interval. The mean needs one value, `sd` and interval need two; else they are None."""

    mean: float | None
    sd: float | None
    ci_low: float | None
    ci_high: float | None
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Mean of (scheme - baseline) over common seeds, in nats/token; negative is better.

    `sd`, interval and p value need two pairs.
    """

    mean: float | None
    sd: float | None
    ci_low: float | None
    ci_high: float | None
    n: int
    p_value: float | None


def mean_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> MeanEstimate:
    """Mean, sample standard deviation and two-sided Student t interval of `values` (one value per seed).

    Raises ValueError for a value that is not finite: omit diverged runs before calling.
    """
    xs = [float(value) for value in values]
    if bad := [x for x in xs if not math.isfinite(x)]:
        raise ValueError(f"cannot average {bad[0]}: omit diverged runs before taking the mean")
    if not xs:
        return MeanEstimate(None, None, None, None, 0)
    mean = fmean(xs)
    if len(xs) < 2:
        return MeanEstimate(mean, None, None, None, 1)
    sd = stdev(xs)
    half = _t_distribution().ppf(0.5 + confidence / 2, len(xs) - 1) * sd / math.sqrt(len(xs))
    return MeanEstimate(mean, sd, float(mean - half), float(mean + half), len(xs))


def paired_difference(
    scheme: Mapping[int, float], baseline: Mapping[int, float], confidence: float = CONFIDENCE
) -> PairedDifference:
    """Paired t test of two schemes' losses by seed, over the seeds that both have; scheme minus baseline.

    Identical runs give difference 0, interval [0, 0] and p = 1.
    """
    differences = [scheme[seed] - baseline[seed] for seed in sorted(scheme.keys() & baseline.keys())]
    estimate = mean_interval(differences, confidence)
    if estimate.mean is None or estimate.sd is None:
        return PairedDifference(estimate.mean, None, None, None, estimate.n, None)
    if estimate.sd == 0:  # the t statistic would divide by zero
        p_value = 1.0 if estimate.mean == 0 else 0.0
    else:
        t = abs(estimate.mean) / (estimate.sd / math.sqrt(estimate.n))
        p_value = float(2 * _t_distribution().sf(t, estimate.n - 1))
    return PairedDifference(estimate.mean, estimate.sd, estimate.ci_low, estimate.ci_high, estimate.n, p_value)


def seeds_needed(sd: float, half_width: float) -> int:
    """The fewest seeds whose 95% interval reaches at most `half_width` to either side, for this standard deviation."""
    t, n = _t_distribution(), max(2, math.ceil((1.96 * sd / half_width) ** 2))  # the normal distribution's n is lower
    while t.ppf(0.5 + CONFIDENCE / 2, n - 1) * sd > half_width * math.sqrt(n):
        n += 1
    return n


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (Scand. J. Statist. 6, 1979), in the given order; None stays None and does not count.

    Without it, one of several comparisons would look significant by chance more than 5% of the time.
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(known):
        # The smallest p is multiplied by the number of comparisons, the next by one less. The running maximum keeps
        # the adjusted values in the order of the original ones.
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[i] = running
    return adjusted


def losses_by_seed(runs: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Final validation loss (nats/token) by seed, of the runs that finished with a finite loss.

    Raises ValueError when a seed occurs twice: pairing by seed would be ambiguous.
    """
    losses: dict[int, float] = {}
    for run in runs:
        if not has_finished(run):
            continue
        if run["seed"] in losses:
            raise ValueError(
                f"seed {run['seed']} occurs twice among the runs of one scheme; give every run its own seed"
            )
        losses[run["seed"]] = float(run["val_loss"])
    return losses


def has_finished(run: Mapping[str, Any]) -> bool:
    """Whether a run record ended with a loss that may be averaged."""
    return run.get("outcome") == "finished" and _finite(run.get("val_loss")) is not None


def has_diverged(run: Mapping[str, Any]) -> bool:
    """Whether a run record diverged. A run that finished without a finite loss counts as diverged too."""
    return run.get("outcome") in ("diverged", "finished") and not has_finished(run)


def summarise(schemes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summarise the run records of every scheme entry of results.json; the first entry is the baseline.

    Each entry needs 'scheme' and 'runs' (records with seed, outcome, val_loss and, where known, collapsed, val_bpb).
    Returns copies that also hold val_loss, perplexity, bits_per_byte, the counts finished, diverged, interrupted and
    collapsed, and difference: None for the baseline, else the paired difference with
    `p_value` and, over all comparisons with the baseline, `p_holm`. The result is strict JSON: unknown values are None.
    """
    losses = [losses_by_seed(entry["runs"]) for entry in schemes]
    differences = [paired_difference(mine, losses[0]) for mine in losses[1:]]
    adjusted = holm([difference.p_value for difference in differences])
    with_holm = [asdict(d) | {"p_holm": p} for d, p in zip(differences, adjusted, strict=True)]
    return [
        {**entry, **_summary(entry["runs"], list(mine.values())), "difference": difference}
        for entry, mine, difference in zip(schemes, losses, [None, *with_holm], strict=False)
    ]


def all_pairs(schemes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paired difference of every two schemes, the later one in `schemes` minus the earlier one.

    `p_holm` is corrected for all pairs. So are the intervals, by Bonferroni's method: all of them together hold in 95%
    of comparisons. Holm's test is the sharper one and may find a pair different whose interval still includes zero.
    """
    losses = {entry["scheme"]: losses_by_seed(entry["runs"]) for entry in schemes}
    pairs = list(combinations(losses, 2))
    tested = sum(len(losses[earlier].keys() & losses[later].keys()) > 1 for earlier, later in pairs)
    joint = 1 - (1 - CONFIDENCE) / max(tested, 1)
    differences = [paired_difference(losses[later], losses[earlier], joint) for earlier, later in pairs]
    adjusted = holm([difference.p_value for difference in differences])
    return [
        {"scheme": later, "against": earlier, **asdict(difference), "p_holm": p}
        for (earlier, later), difference, p in zip(pairs, differences, adjusted, strict=True)
    ]


def call(difference: Mapping[str, Any] | None) -> Call:
    """'better' or 'worse' if the Holm-adjusted p value is under 5%, else 'unclear'; 'unknown' with under two pairs."""
    if not difference or difference.get("p_value") is None:
        return "unknown"
    p_holm = difference.get("p_holm")
    if (difference["p_value"] if p_holm is None else p_holm) >= 1 - CONFIDENCE:
        return "unclear"
    return "better" if difference["mean"] < 0 else "worse"


def perplexity_change(difference: float) -> float:
    """Relative change of perplexity, in percent, for a difference of losses in nats/token."""
    # exp overflows above 709.
    return 100 * math.expm1(min(difference, 700.0))


def _t_distribution() -> Any:
    try:
        from scipy.stats import t
    except ImportError as error:
        raise ImportError('confidence intervals need scipy: pip install "spheret[report]"') from error
    return t


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _summary(runs: Sequence[Mapping[str, Any]], losses: list[float]) -> dict[str, Any]:
    finished = [run for run in runs if has_finished(run)]
    estimate = mean_interval(losses)
    return {
        "val_loss": asdict(estimate),
        "perplexity": math.exp(estimate.mean) if estimate.mean is not None and estimate.mean < 700 else None,
        "bits_per_byte": _mean_of(finished, "val_bpb"),
        "finished": len(finished),
        "diverged": sum(has_diverged(r) for r in runs),
        "interrupted": sum(not has_finished(r) and not has_diverged(r) for r in runs),
        "collapsed": sum(bool(r.get("collapsed")) for r in finished),
    }


def _mean_of(runs: Iterable[Mapping[str, Any]], key: str) -> float | None:
    values = [x for run in runs if (x := _finite(run.get(key))) is not None]
    return fmean(values) if values else None
