"""At which learning rates a scheme trains, and how soon it reaches the baseline's final loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from spheret.comparison.statistics import has_finished

TOLERANCE = 0.05
"""Nats/token above a scheme's best loss within which a learning rate counts as one that trains."""
Curve = Sequence[tuple[int, float]]
"""(training tokens, validation loss) of one run at each of its evaluations."""


@dataclass(frozen=True)
class RateRange:
    """Learning rates at which a scheme trains. `low` and `high` are None if no rate does.

    At an open end, the rate is the last one of the grid: the range may go on.
    """

    low: float | None
    high: float | None
    open_low: bool = False
    open_high: bool = False


def rates_that_train(entry: Mapping[str, Any]) -> RateRange | None:
    """The stretch of neighbouring rates around a scheme's best one at which it trains, from its entry in results.json.

    A rate trains if its tuning run ends within TOLERANCE of the best tuning run, and no run at this rate, whatever its
    seed, diverged or collapsed. None if fewer than two rates were tried, or if not all tuning runs have ended.
    """
    tuning = sorted(entry.get("tuning") or [], key=lambda run: float(run["lr"]))
    unfinished = any(run.get("outcome") == "interrupted" for run in tuning)
    if len(tuning) < max(2, len(entry.get("rates") or ())) or unfinished:
        return None
    failed = {run.get("lr", entry.get("lr")) for run in (*tuning, *entry["runs"]) if _failed(run)}
    losses = [run["val_loss"] if has_finished(run) and not run.get("collapsed") else None for run in tuning]
    known = [loss for loss in losses if loss is not None]
    if not known:
        return RateRange(None, None)
    best = min(known)
    trains = [
        loss is not None and loss <= best + TOLERANCE and run["lr"] not in failed
        for run, loss in zip(tuning, losses, strict=True)
    ]
    first = last = losses.index(best)
    if not trains[first]:
        return RateRange(None, None)
    while first > 0 and trains[first - 1]:
        first -= 1
    while last < len(trains) - 1 and trains[last + 1]:
        last += 1
    return RateRange(tuning[first]["lr"], tuning[last]["lr"], first == 0, last == len(trains) - 1)


def _failed(run: Mapping[str, Any]) -> bool:
    ended = run.get("outcome") in ("finished", "diverged")  # an interrupted run says nothing about its rate
    return ended and (not has_finished(run) or bool(run.get("collapsed")))


@dataclass(frozen=True)
class ToBaseline:
    """Where a scheme's mean validation curve reaches the mean final loss of the baseline; None if it never does.

    `share` is relative to the tokens, and so to the steps, of a whole run of the baseline, and `flops_share` to the
    operations of such a run.
    """

    steps: float | None
    tokens: float | None
    flops: float | None
    share: float | None
    flops_share: float | None


NEVER = ToBaseline(None, None, None, None, None)


def with_to_baseline(
    schemes: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[Curve]], tokens_per_step: int
) -> list[dict[str, Any]]:
    """Copies of the entries of results.json (after `summarise`) that also hold `to_baseline`, a `ToBaseline` or None.

    `curves` has, for each scheme, the curves of the runs that its mean loss covers. `to_baseline` is None where nothing
    can be said: the baseline did not finish, or the scheme was evaluated fewer than twice. An entry needs
    `flops_per_token`; without it, the operations are None.
    """
    if not schemes:
        return []
    means = {scheme: mean_curve(found) for scheme, found in curves.items()}
    baseline, target = schemes[0], schemes[0]["val_loss"]["mean"]
    whole = [tokens for tokens, _ in means.get(baseline["scheme"], ())][-1:]

    def reached(entry: Mapping[str, Any]) -> ToBaseline | None:
        curve = means.get(entry["scheme"], [])
        if target is None or not whole or len(curve) < 2:
            return None
        if (tokens := first_below(curve, target)) is None:
            return NEVER
        share, own, others = tokens / whole[0], entry.get("flops_per_token"), baseline.get("flops_per_token")
        flops, flops_share = (tokens * own, share * own / others) if own and others else (None, None)
        return ToBaseline(tokens / tokens_per_step, tokens, flops, share, flops_share)

    found = [reached(entry) for entry in schemes]
    return [{**e, "to_baseline": None if f is None else asdict(f)} for e, f in zip(schemes, found, strict=True)]


def mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """The mean over runs, at the tokens at which all of them were evaluated: a mean over fewer runs would jump."""
    tables = [dict(curve) for curve in curves]
    shared = sorted(set(tables[0]).intersection(*tables[1:])) if tables else []
    return [(tokens, fmean(table[tokens] for table in tables)) for tokens in shared]


def first_below(curve: Curve, target: float) -> float | None:
    """Tokens at which the curve first reaches `target`, on the straight line between two evaluations; None if never.

    A curve that starts below the target reaches it by its first evaluation, and that is what is returned.
    """
    before: tuple[float, float] | None = None
    for tokens, loss in curve:
        if loss <= target + 1e-9:  # the baseline reaches its own final loss, whatever the rounding
            if before is None:
                return float(tokens)
            share = min(1.0, (before[1] - target) / (before[1] - loss))
            return before[0] + share * (tokens - before[0])
        before = tokens, loss
    return None
