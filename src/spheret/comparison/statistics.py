"""What a comparison may claim: means, paired differences and a verdict in plain language.

Every interval is a 95% Student t interval over seeds. Schemes are compared in pairs of runs with the same seed, and so
the same order of data: the variation that both runs share cancels. Runs that diverged are counted and named, but never
averaged. Runs that collapsed to the unigram plateau did finish, so they are named and also averaged, here and in every
figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

    Interval and p value need two pairs.
    """

    mean: float | None
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
        return PairedDifference(estimate.mean, None, None, estimate.n, None)
    if estimate.sd == 0:  # the t statistic would divide by zero
        p_value = 1.0 if estimate.mean == 0 else 0.0
    else:
        t = abs(estimate.mean) / (estimate.sd / math.sqrt(estimate.n))
        p_value = float(2 * _t_distribution().sf(t, estimate.n - 1))
    return PairedDifference(estimate.mean, estimate.ci_low, estimate.ci_high, estimate.n, p_value)


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


def call(difference: Mapping[str, Any] | None) -> Call:
    """'better' or 'worse' if the Holm-adjusted p value is under 5%, else 'unclear'; 'unknown' with under two pairs."""
    if not difference or difference.get("p_value") is None:
        return "unknown"
    p_holm = difference.get("p_holm")
    if (difference["p_value"] if p_holm is None else p_holm) >= 1 - CONFIDENCE:
        return "unclear"
    return "better" if difference["mean"] < 0 else "worse"


def verdict(results: Mapping[str, Any]) -> str:
    """The answer in plain language, from results.json: a headline, a '- ' line for each scheme, then 'Note: ' lines."""
    schemes = results["schemes"]
    if not schemes:
        return "Nothing was compared: name at least two schemes, for instance `--schemes pre-ln spheret:p=1`."
    baseline, others = schemes[0], schemes[1:]
    lines = [_headline(baseline, others), *(f"- {_comparison(entry, baseline)}" for entry in others)]
    notes = [*_outcome_notes(schemes), *_seed_notes(schemes), *_precision_notes(others), *_learning_rate_notes(results)]
    return "\n".join(lines + [f"Note: {note}" for note in notes])


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


def _headline(baseline: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    name = baseline["scheme"]
    if not others:
        return f"Nothing to compare: {name} is the only scheme. Name a second one after `--schemes`."
    if not losses_by_seed(baseline["runs"]):
        return f"No verdict: no run of the baseline {name} finished, so there is nothing to compare with."
    seeds = {run["seed"] for entry in (baseline, *others) for run in entry["runs"]}
    if len(seeds) < 2:
        return (
            "No verdict: with one seed, a difference between schemes cannot be told from the luck of that seed. "
            "Run it again with `--seeds 3` or more."
        )
    names: dict[Call, list[str]] = {"better": [], "worse": [], "unclear": [], "unknown": []}
    for entry in others:
        names[call(entry["difference"])].append(_named(entry))
    words = {
        "better": "better",
        "worse": "worse",
        "unclear": "not distinguishable at 95%",
        "unknown": "no verdict",
    }
    parts = [f"{words[kind]}: {', '.join(found)}" for kind, found in names.items() if found]
    return f"Compared with {_named(baseline)}, {'; '.join(parts)}."


def _named(entry: Mapping[str, Any]) -> str:
    """The scheme's name, with the runs that its figures leave out: 'cay (1 of 3 runs diverged)'."""
    # In the headline itself: a reader who goes no further must not take three runs for granted.
    lost = unfinished_words(len(entry["runs"]), entry["diverged"], entry["interrupted"])
    return f"{entry['scheme']} ({lost})" if lost else entry["scheme"]


def unfinished_words(runs: int, diverged: int, interrupted: int) -> str:
    """'1 of 3 runs diverged'; '' if all runs finished."""
    counts = [f"{n} of {runs} runs {word}" for n, word in ((diverged, "diverged"), (interrupted, "interrupted")) if n]
    return ", ".join(counts)


def _comparison(entry: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    name, difference, baseline = entry["scheme"], entry["difference"], other["scheme"]
    kind = call(difference)
    if kind == "unknown":
        return _without_interval(entry, other)
    mean, low, high = (difference[key] for key in ("mean", "ci_low", "ci_high"))
    figures = f"{mean:+.4f} nats/token [{low:+.4f}, {high:+.4f}], {_perplexity_words(mean)}"
    p_value, p_holm, n = difference["p_value"], difference.get("p_holm"), difference["n"]
    basis = f"{n} paired seeds, p = {_p(p_value)}"
    if p_holm is not None and p_holm != p_value:
        basis += f", {_p(p_holm)} after Holm's correction"
    relation = f"not distinguishable from {baseline} at 95%" if kind == "unclear" else f"{kind} than {baseline}"
    sentence = f"{name} is {relation}: {figures} ({basis}){_left_out(entry, other)}."
    if kind == "unclear" and p_value < 1 - CONFIDENCE:
        sentence += " Its own interval excludes zero, but with this many comparisons that may be chance."
    return sentence


def _left_out(entry: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """The end of a claim's own sentence that says which diverged runs it leaves out; '' if there are none."""
    lost = [(e["diverged"], "" if e is entry else f" of {e['scheme']}") for e in (entry, baseline) if e["diverged"]]
    runs = [f"{n} diverged run{'s' * (n > 1)}{whose}" for n, whose in lost]
    return f", which does not include {' and '.join(runs)}" if runs else ""


def _without_interval(entry: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    name, difference, baseline = entry["scheme"], entry["difference"], other["scheme"]
    if not losses_by_seed(entry["runs"]):
        return f"{name}: no run finished, so there is no loss to compare."
    if not difference or not difference["n"]:
        return f"{name}: no seed finished both here and with {baseline}, so there is no paired difference."
    mean = difference["mean"]
    return (
        f"{name}: {mean:+.4f} nats/token against {baseline}, {_perplexity_words(mean)}, on one paired seed; "
        f"fewer than two paired seeds give no interval{_left_out(entry, other)}."
    )


def _perplexity_words(difference: float) -> str:
    change = perplexity_change(difference)
    if f"{abs(change):.1f}" == "0.0":
        return "perplexity the same to 0.1%"
    return f"perplexity {abs(change):.1f}% {'lower' if change < 0 else 'higher'}"


def _p(value: float) -> str:
    return "<0.0001" if value < 1e-4 else f"{value:.2g}"


def _outcome_notes(schemes: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    for entry in schemes:
        total, name = len(entry["runs"]), entry["scheme"]
        if entry["diverged"]:
            which = _seeds(r for r in entry["runs"] if has_diverged(r))
            losses = [
                f"{r['last_loss']:.4f}" for r in entry["runs"] if has_diverged(r) and r.get("last_loss") is not None
            ]
            last = f", last finite training loss {', '.join(losses)}" if losses else ""
            rest = "; the figures cover only the runs that finished" if any(map(has_finished, entry["runs"])) else ""
            notes.append(f"{name} diverged in {entry['diverged']} of {total} runs ({which}{last}){rest}.")
        if entry.get("interrupted"):
            which = _seeds(r for r in entry["runs"] if not has_finished(r) and not has_diverged(r))
            notes.append(f"{name} was interrupted in {entry['interrupted']} of {total} runs ({which}).")
        if entry["collapsed"]:
            which = _seeds(r for r in entry["runs"] if has_finished(r) and r.get("collapsed"))
            notes.append(
                f"{name} collapsed in {entry['collapsed']} of {total} runs ({which}): its loss stopped falling "
                "before it had learned more than how often each token occurs. Collapsed runs count in the mean and "
                "widen its interval."
            )
    return notes


def _seeds(runs: Iterable[Mapping[str, Any]]) -> str:
    seeds = [str(run["seed"]) for run in runs]
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def _seed_notes(schemes: Sequence[Mapping[str, Any]]) -> list[str]:
    losses = {entry["scheme"]: list(losses_by_seed(entry["runs"]).values()) for entry in schemes}
    alike = [name for name, values in losses.items() if len(values) > 1 and len(set(values)) == 1]
    if not alike:
        return []
    return [f"All seeds of {', '.join(alike)} gave exactly the same loss; check that the seed reaches the run."]


def _precision_notes(others: Sequence[Mapping[str, Any]]) -> list[str]:
    if all(call(entry["difference"]) != "unclear" for entry in others):
        return []
    return [
        "Not distinguishable does not mean equal: any difference inside the interval remains possible, and more "
        "`--seeds` make it narrower."
    ]


def _learning_rate_notes(results: Mapping[str, Any]) -> list[str]:
    schemes = results["schemes"]
    tried = {t["lr"] for entry in schemes for t in entry.get("tuning") or []}
    grid = sorted(set(results.get("settings", {}).get("lrs") or tried))
    if len(grid) == 1:
        return [
            f"Every scheme ran at the one learning rate {grid[0]:g}, which may suit some better than others; "
            f"try several with `--lrs {grid[0] / 3:.2g} {grid[0]:g} {grid[0] * 3:.2g}`."
        ]
    edge = [entry for entry in schemes if entry.get("lr_at_edge") and entry.get("lr") is not None]
    if not edge or not grid:
        return []
    # Keep all earlier rates, so that their finished runs are reused. Rates on the command line hold for all schemes, so
    # the defaults of each scheme are joined.
    wider = {f"{lr:g}" for entry in schemes for lr in entry.get("rates") or grid}
    wider |= {_beyond(entry["lr"], entry.get("rates") or grid) for entry in edge}
    where = ", ".join(f"{entry['scheme']} ({entry['lr']:g})" for entry in edge)
    typed = " ".join(sorted(wider, key=float))
    return [f"The best learning rate lies at the edge of the grid for {where}; widen it with `--lrs {typed}`."]


def _beyond(lr: float, grid: Sequence[float]) -> str:
    """The rate one step beyond the edge of the grid at which `lr` lies, in the ratio of the last two rates."""
    return f"{grid[0] ** 2 / grid[1]:.2g}" if lr <= grid[0] else f"{grid[-1] ** 2 / grid[-2]:.2g}"
