"""The answer of a comparison in plain language: what its statistics support, and what a reader must know beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spheret.comparison.reach import TOLERANCE, RateRange, rates_that_train
from spheret.comparison.statistics import (
    CONFIDENCE,
    Call,
    call,
    has_diverged,
    has_finished,
    losses_by_seed,
    perplexity_change,
    seeds_needed,
)

RESOLUTION = 0.01
"""Nats/token: half of the interval for which a note tells the number of seeds."""


def verdict(results: Mapping[str, Any]) -> str:
    """The answer in plain language, from results.json: a headline, '- ' lines, then 'Note: ' lines.

    There is a '- ' line for each scheme, one for the learning rates at which the schemes train, and one for the steps
    they take to the baseline's loss.
    """
    schemes = results["schemes"]
    if not schemes:
        return "Nothing was compared: name at least two schemes, for instance `--schemes pre-ln spheret:p=1`."
    baseline, others = schemes[0], schemes[1:]
    lines = [_headline(baseline, others), *(f"- {_comparison(entry, baseline)}" for entry in others)]
    lines += [f"- {line}" for line in (*_rate_lines(schemes), *_reach_lines(others, baseline["scheme"]))]
    notes = [*_outcome_notes(schemes), *_seed_notes(schemes), *_precision_notes(others), *_learning_rate_notes(results)]
    return "\n".join(lines + [f"Note: {note}" for note in notes])


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
    basis = f"{n} paired seeds, {_p(p_value)}"
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


def _rate_lines(schemes: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [(entry["scheme"], rates_that_train(entry)) for entry in schemes]
    ranges = [f"{scheme} {range_words(rates)}" for scheme, rates in found if rates is not None]
    if not ranges:
        return []
    return [
        f"Learning rates that end within {TOLERANCE:g} nats of a scheme's best, with no run diverged or collapsed: "
        f"{'; '.join(ranges)}."
    ]


def range_words(rates: RateRange) -> str:
    """'0.0015 to 0.012 or more (at least 8x)', '0.003 only' or 'none'."""
    if rates.low is None or rates.high is None:
        return "none"
    low = f"{rates.low:g}{' or less' if rates.open_low else ''}"
    high = f"{rates.high:g}{' or more' if rates.open_high else ''}"
    if rates.low == rates.high:
        return high if rates.open_high else low if rates.open_low else f"{low} only"
    factor = f"{'at least ' if rates.open_low or rates.open_high else ''}{rates.high / rates.low:.2g}x"
    return f"{low} to {high} ({factor})"


def _reach_lines(others: Sequence[Mapping[str, Any]], baseline: str) -> list[str]:
    parts = [f"{_named(e)} {share_words(e['to_baseline'])}" for e in others if e.get("to_baseline")]
    if not parts:
        return []
    return [
        f"Steps to the final loss of {baseline}, as a share of its run and interpolated between evaluations: "
        f"{', '.join(parts)}."
    ]


def share_words(reached: Mapping[str, Any]) -> str:
    """'61%', '61% (92% of the FLOPs)' where the operations per step differ, or 'never'."""
    if reached["share"] is None:
        return "never"
    steps = f"{reached['share']:.0%}"
    flops = steps if reached["flops_share"] is None else f"{reached['flops_share']:.0%}"
    return steps if flops == steps else f"{steps} ({flops} of the FLOPs)"


def _perplexity_words(difference: float) -> str:
    change = perplexity_change(difference)
    if f"{abs(change):.1f}" == "0.0":
        return "perplexity the same to 0.1%"
    return f"perplexity {abs(change):.1f}% {'lower' if change < 0 else 'higher'}"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


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
    unclear = [entry for entry in others if call(entry["difference"]) == "unclear"]
    if not unclear:
        return []
    # A collapsed run would make the number meaningless.
    sound = [e for e in unclear if e["difference"].get("sd") is not None and not e.get("collapsed")]
    seeds = [(e, seeds_needed(e["difference"]["sd"], RESOLUTION)) for e in sound]
    more = [f"{n} ({e['scheme']})" for e, n in seeds if n > e["difference"]["n"]]
    note = (
        "Not distinguishable does not mean equal: any difference inside the interval remains possible, and more "
        "`--seeds` make it narrower."
    )
    if more:
        note += (
            f" Judged by the spread so far, an interval of {RESOLUTION:g} nats to either side takes about this many: "
            f"{', '.join(more)}."
        )
    return [note]


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
