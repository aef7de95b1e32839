from __future__ import annotations

import json
import math
import random
import re
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spheret.comparison.statistics import (
    all_pairs,
    call,
    holm,
    losses_by_seed,
    mean_interval,
    paired_difference,
    perplexity_change,
    seeds_needed,
    summarise,
)
from spheret.comparison.verdict import verdict

losses = st.floats(min_value=0.5, max_value=12.0, allow_nan=False)


def run(seed: int, loss: float | None, outcome: str = "finished", **extra: Any) -> dict[str, Any]:
    return {"seed": seed, "outcome": outcome, "val_loss": loss, "collapsed": False, **extra}


def entry(scheme: str, *values: float | None, **extra: Any) -> dict[str, Any]:
    """A scheme whose run with seed i ended with the i-th loss; None means that it diverged."""
    runs = [run(i, v, "finished" if v is not None else "diverged") for i, v in enumerate(values, start=1)]
    return {"scheme": scheme, "runs": runs, "lr": 0.003, "lr_at_edge": False, "tuning": [], **extra}


def results(*entries: dict[str, Any], lrs: tuple[float, ...] = (0.001, 0.003, 0.01)) -> dict[str, Any]:
    return {"settings": {"lrs": list(lrs)}, "schemes": summarise(entries)}


def test_interval_agrees_with_scipy() -> None:
    values = [3.21, 3.25, 3.19, 3.3]
    ours = mean_interval(values)
    low, high = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert (ours.ci_low, ours.ci_high) == pytest.approx((low, high), rel=1e-12)
    assert ours.sd == pytest.approx(stats.tstd(values))


def test_paired_difference_agrees_with_scipy() -> None:
    a, b = [3.21, 3.25, 3.19, 3.3], [3.30, 3.27, 3.28, 3.31]
    ours = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    theirs = stats.ttest_rel(a, b)
    interval = theirs.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-10)
    assert (ours.ci_low, ours.ci_high) == pytest.approx((interval.low, interval.high), rel=1e-10)


def test_too_few_values_have_no_interval() -> None:
    assert mean_interval([]).mean is None
    one = mean_interval([2.0])
    assert (one.mean, one.sd, one.ci_low, one.n) == (2.0, None, None, 1)
    pair = paired_difference({1: 2.0, 2: 2.1}, {2: 2.0, 3: 2.0})
    assert pair.mean == pytest.approx(0.1)
    assert (pair.ci_low, pair.ci_high, pair.n, pair.p_value) == (None, None, 1, None)


def test_a_value_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nan.*diverged"):
        mean_interval([2.0, math.nan])


@given(st.dictionaries(st.integers(0, 50), losses, min_size=2, max_size=8))
def test_identical_runs_differ_by_nothing(by_seed: dict[int, float]) -> None:
    same = paired_difference(by_seed, dict(by_seed))
    assert (same.mean, same.ci_low, same.ci_high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_order_and_names_of_seeds_do_not_matter(pairs: list[tuple[float, float]], rng: random.Random) -> None:
    seeds = rng.sample(range(1000), len(pairs))
    rng.shuffle(shuffled := list(zip(seeds, pairs, strict=True)))
    first = paired_difference({i: a for i, (a, _) in enumerate(pairs)}, {i: b for i, (_, b) in enumerate(pairs)})
    second = paired_difference({s: a for s, (a, _) in shuffled}, {s: b for s, (_, b) in shuffled})
    assert first == second


@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=8), st.sampled_from([0.25, 2.0, 8.0]))
def test_scaling_the_losses_scales_the_interval_and_keeps_p(pairs: list[tuple[float, float]], scale: float) -> None:
    a, b = ({i: pair[k] for i, pair in enumerate(pairs)} for k in (0, 1))
    plain = paired_difference(a, b)
    scaled = paired_difference({i: scale * x for i, x in a.items()}, {i: scale * x for i, x in b.items()})
    assert scaled.mean == pytest.approx(scale * plain.mean)
    assert (scaled.ci_low, scaled.ci_high) == pytest.approx((scale * plain.ci_low, scale * plain.ci_high), abs=1e-12)
    assert scaled.p_value == pytest.approx(plain.p_value)


@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=8))
def test_interval_excludes_zero_exactly_when_p_is_under_five_percent(pairs: list[tuple[float, float]]) -> None:
    d = paired_difference(dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs)))
    assert d.ci_low is not None and d.ci_high is not None and d.p_value is not None
    if abs(d.p_value - 0.05) > 1e-9:
        assert (d.p_value < 0.05) == (d.ci_low > 0 or d.ci_high < 0)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_intervals_cover_the_truth_as_often_as_they_say(n: int) -> None:
    rng = random.Random(n)
    covered = paired = 0
    for _ in range(500):
        luck = {seed: rng.gauss(0, 0.05) for seed in range(n)}
        a = {seed: 3.0 + x + rng.gauss(0, 0.01) for seed, x in luck.items()}
        b = {seed: 3.1 + x + rng.gauss(0, 0.02) for seed, x in luck.items()}
        mean, difference = mean_interval(a.values()), paired_difference(a, b)
        covered += mean.ci_low <= 3.0 <= mean.ci_high  # type: ignore[operator]
        paired += difference.ci_low <= -0.1 <= difference.ci_high  # type: ignore[operator]
    assert 0.92 <= covered / 500 <= 0.98
    assert 0.92 <= paired / 500 <= 0.98


def test_pairing_removes_what_the_seeds_share() -> None:
    shared = [0.0, 0.3, -0.2, 0.1]
    a = {i: 3.00 + x + d for i, (x, d) in enumerate(zip(shared, [0.001, -0.001, 0.0, 0.001], strict=True))}
    b = {i: 3.02 + x for i, x in enumerate(shared)}
    paired, alone = paired_difference(a, b), mean_interval(a.values())
    assert paired.ci_high is not None and paired.ci_high < 0
    assert alone.ci_low is not None and alone.ci_low < 3.0 < alone.ci_high  # type: ignore[operator]


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.02, None]) == [None, 0.02, None]
    assert holm([]) == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_the_order(p_values: list[float | None]) -> None:
    known = [(p, q) for p, q in zip(p_values, holm(p_values), strict=True) if p is not None and q is not None]
    assert all(p <= q <= 1 for p, q in known)
    ordered = [q for _, q in sorted(known)]
    assert ordered == sorted(ordered)
    assert [p is None for p in p_values] == [q is None for q in holm(p_values)]


def test_summary_leaves_diverged_runs_out_and_keeps_collapsed_ones() -> None:
    runs = [
        run(1, 2.0, val_bpb=1.0),
        run(2, 99.0, "diverged"),
        run(3, 4.0, collapsed=True, val_bpb=3.0),
        run(4, None, "interrupted"),
    ]
    base, other = summarise([entry("pre-ln", 2.0, 2.1, 2.2), {"scheme": "keel", "runs": runs}])
    assert other["val_loss"]["mean"] == pytest.approx(3.0)
    assert [other[key] for key in ("finished", "diverged", "interrupted", "collapsed")] == [2, 1, 1, 1]
    assert other["bits_per_byte"] == pytest.approx(2.0)
    assert other["perplexity"] == pytest.approx(math.exp(3.0))
    assert other["difference"]["n"] == 2 and base["difference"] is None


def test_a_run_that_finished_without_a_finite_loss_counts_as_diverged() -> None:
    (base,) = summarise([{"scheme": "pre-ln", "runs": [run(1, math.nan), run(2, 2.0)]}])
    assert (base["diverged"], base["finished"], base["val_loss"]["mean"]) == (1, 1, 2.0)


def test_summary_is_strict_json_even_when_nothing_finished() -> None:
    filled = summarise([entry("pre-ln", None, None), entry("cay", 2.0, None), {"scheme": "ngpt", "runs": []}])
    text = json.dumps(filled, allow_nan=False)
    assert json.loads(text) == filled
    assert (
        filled[0]["val_loss"]["mean"] is None and filled[0]["perplexity"] is None and filled[1]["difference"]["n"] == 0
    )


def test_summary_does_not_change_what_it_is_given() -> None:
    given_entries = [entry("pre-ln", 2.0, 2.1), entry("cay", 1.9, 2.0)]
    before = json.dumps(given_entries)
    summarise(given_entries)
    assert json.dumps(given_entries) == before


def test_holm_counts_all_comparisons_with_the_baseline() -> None:
    filled = summarise([entry("a", 3.0, 3.1, 3.2), entry("b", 2.9, 3.01, 3.09), entry("c", 3.1, 3.18, 3.31)])
    small, large = sorted((e["difference"]["p_value"], e["difference"]["p_holm"]) for e in filled[1:])
    assert small[1] == pytest.approx(2 * small[0])
    assert large[1] == pytest.approx(max(large[0], 2 * small[0]))


def test_all_pairs_are_corrected_for_their_number() -> None:
    values = {"a": (3.0, 3.1, 3.2), "b": (2.9, 3.01, 3.09), "c": (3.1, 3.18, 3.31), "lost": (None, None, None)}
    pairs = all_pairs([entry(name, *found) for name, found in values.items()])
    assert [(p["against"], p["scheme"]) for p in pairs] == [
        *(("a", "b"), ("a", "c"), ("a", "lost"), ("b", "c"), ("b", "lost"), ("c", "lost")),
    ]
    known = [p for p in pairs if p["scheme"] != "lost"]
    assert [p["p_holm"] for p in known] == holm([p["p_value"] for p in known]), "three tests, not six"
    for pair in known:
        test = stats.ttest_rel(values[pair["scheme"]], values[pair["against"]])
        interval = test.confidence_interval(1 - 0.05 / 3)
        assert pair["p_value"] == pytest.approx(test.pvalue)
        assert (pair["ci_low"], pair["ci_high"]) == pytest.approx((interval.low, interval.high))
    json.dumps(pairs, allow_nan=False)
    assert all(p["mean"] is p["p_holm"] is None for p in pairs if p["scheme"] == "lost") and all_pairs([]) == []


@pytest.mark.parametrize("sd", [0.0, 0.001, 0.01, 0.05])
def test_so_many_seeds_and_no_fewer_reach_the_interval(sd: float) -> None:
    n = seeds_needed(sd, 0.01)
    half_widths = [stats.t.ppf(0.975, m - 1) * sd / math.sqrt(m) for m in (n, max(2, n - 1))]
    assert half_widths[0] <= 0.01 and (n == 2 or half_widths[1] > 0.01)


def test_an_open_verdict_tells_how_many_seeds_would_settle_it() -> None:
    base, other = entry("pre-ln", 3.0, 3.0, 3.0), entry("cay", 3.01, 2.99, 3.02)
    sd = stats.tstd([0.01, -0.01, 0.02])
    assert f"about this many: {seeds_needed(sd, 0.01)} (cay)" in verdict(results(base, other))
    assert "about this many" not in verdict(results(base, entry("cay", 3.001, 2.999, 3.0)))


def test_a_seed_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="seed 7 occurs twice"):
        losses_by_seed([run(7, 2.0), run(7, 2.1)])


def test_call_uses_the_adjusted_p_value() -> None:
    difference = {"mean": -0.1, "p_value": 0.03, "p_holm": 0.06}
    assert call(difference) == "unclear"
    assert call(difference | {"p_holm": 0.03}) == "better"
    assert call(difference | {"p_holm": 0.03, "mean": 0.1}) == "worse"
    assert call(None) == call({"mean": 1.0, "p_value": None}) == "unknown"


def test_perplexity_change_in_percent() -> None:
    assert perplexity_change(math.log(1.1)) == pytest.approx(10.0)
    assert perplexity_change(0.0) == 0.0
    assert math.isfinite(perplexity_change(1e6))


def test_verdict_names_better_worse_and_undecided_with_figures() -> None:
    text = verdict(
        results(
            entry("pre-ln", 3.000, 3.010, 3.020),
            entry("cay", 2.950, 2.961, 2.969),
            entry("ngpt", 3.100, 3.111, 3.119),
            entry("keel", 3.010, 2.990, 3.030),
        )
    )
    headline, *lines = text.splitlines()
    assert headline == "Compared with pre-ln, better: cay; worse: ngpt; not distinguishable at 95%: keel."
    assert (
        "cay is better than pre-ln: -0.0500 nats/token [-0.0525, -0.0475], perplexity 4.9% lower (3 paired" in lines[0]
    )
    assert "ngpt is worse" in lines[1] and "keel is not distinguishable" in lines[2]
    assert any("does not mean equal" in line for line in lines)


def test_one_seed_gives_no_verdict_and_says_what_to_type() -> None:
    text = verdict(results(entry("pre-ln", 3.0), entry("cay", 2.0)))
    assert text.startswith("No verdict: with one seed") and "`--seeds 3`" in text
    assert "better" not in text and "-1.0000 nats/token" in text


def test_identical_schemes_are_not_distinguishable() -> None:
    text = verdict(results(entry("pre-ln", 3.0, 3.1, 3.2), entry("proj", 3.0, 3.1, 3.2)))
    assert (
        "+0.0000 nats/token [+0.0000, +0.0000]" in text and "p = 1)" in text and "proj is not distinguishable" in text
    )


def test_verdict_tells_when_only_the_single_interval_excludes_zero() -> None:
    schemes = summarise([entry("pre-ln", 3.0, 3.0, 3.0), entry("cay", 2.9, 2.8, 2.95), entry("keel", 3.1, 2.9, 3.0)])
    schemes[1]["difference"] |= {"p_value": 0.04, "p_holm": 0.08}
    text = verdict({"settings": {}, "schemes": schemes})
    assert "cay is not distinguishable" in text and "with this many comparisons that may be chance" in text


def test_verdict_names_failed_runs() -> None:
    broken = entry("keel", 2.9, None, 2.95)
    broken["runs"][0]["collapsed"] = True
    broken["runs"].append(run(4, None, "interrupted"))
    text = verdict(results(entry("pre-ln", 3.0, 3.1, 3.2, 3.0), broken, entry("cay", None, None, None, None)))
    assert "keel diverged in 1 of 4 runs (seed 2)" in text and "keel collapsed in 1 of 4 runs (seed 1)" in text
    assert "keel was interrupted in 1 of 4 runs (seed 4)" in text and "does not include 1 diverged run." in text
    assert "cay: no run finished" in text and "cay diverged in 4 of 4 runs (seeds 1, 2, 3, 4)" in text


def claims(text: str) -> list[str]:
    """The sentences of a verdict that call a scheme better, worse or not distinguishable."""
    lines = [line for line in text.splitlines() if not line.startswith("Note")]
    sentences = [part for line in lines for part in re.split(r"(?<=\.) (?=[A-Z])", line)]
    return [s for s in sentences if re.search(r"better|worse|distinguishable", s)]


@pytest.mark.parametrize("loss", [2.9, 3.1, 3.0])
def test_no_claim_without_its_diverged_runs_in_the_same_sentence(loss: float) -> None:
    """Whichever side lost the runs, and whatever the claim is."""
    shaky = entry("keel", loss, None, loss + 0.011, loss + 0.019)
    sound = entry("pre-ln", 3.000, 3.010, 3.0101, 3.020)
    for first, second in ((sound, shaky), (shaky, sound)):
        text = verdict(results(first, second))
        assert len(claims(text)) == 2 and all("diverged" in sentence for sentence in claims(text)), text
        assert "keel (1 of 4 runs diverged)" in text.splitlines()[0]
    assert not any("diverged" in s for s in claims(verdict(results(sound, entry("cay", 2.9, 2.91, 2.91, 2.92)))))


def test_the_headline_names_runs_that_crashed_too() -> None:
    crashed = entry("keel", 2.9, 2.91, 2.92)
    crashed["runs"].append(run(4, None, "interrupted"))
    text = verdict(results(entry("pre-ln", 3.0, 3.01, 3.02, 3.03), crashed))
    assert "better: keel (1 of 4 runs interrupted)" in text.splitlines()[0]


def test_the_last_finite_loss_of_a_diverged_run_is_told() -> None:
    broken = entry("keel", 2.9, None, 2.95)
    broken["runs"][1] |= {"last_loss": 2.31449, "last_loss_step": 120}
    text = verdict(results(entry("pre-ln", 3.0, 3.1, 3.2), broken))
    assert "keel diverged in 1 of 3 runs (seed 2, last finite training loss 2.3145)" in text


def test_too_few_pairs_are_said_for_the_scheme_alone() -> None:
    text = verdict(results(entry("pre-ln", 3.0, 3.1, 3.2), entry("cay", 2.9, None, None), entry("keel", 2.9, 3.0, 3.1)))
    assert "cay: -0.1000 nats/token against pre-ln" in text and "fewer than two paired seeds" in text
    assert "no verdict: cay" in text.splitlines()[0]


def test_without_a_finished_baseline_nothing_is_compared() -> None:
    text = verdict(results(entry("pre-ln", None, None), entry("cay", 2.9, 3.0)))
    assert text.startswith("No verdict: no run of the baseline pre-ln finished") and "no seed finished both" in text


def test_one_scheme_or_none_says_what_to_add() -> None:
    assert "--schemes" in verdict(results(entry("pre-ln", 3.0, 3.1)))
    assert "--schemes" in verdict({"settings": {}, "schemes": []})


@pytest.mark.parametrize(
    ("best", "typed"),
    [(0.01, "`--lrs 0.001 0.003 0.01 0.033`"), (0.001, "`--lrs 0.00033 0.001 0.003 0.01`")],
)
def test_best_rate_at_the_edge_asks_for_a_wider_grid(best: float, typed: str) -> None:
    other = entry("cay", 2.9, 3.0, lr=best, lr_at_edge=True)
    text = verdict(results(entry("pre-ln", 3.0, 3.1), other))
    assert f"at the edge of the grid for cay ({best:g})" in text and typed in text


def test_schemes_with_grids_of_their_own_are_widened_by_their_own() -> None:
    other = entry("cay", 2.9, 3.0, lr=0.04, lr_at_edge=True, rates=[0.01, 0.02, 0.04])
    text = verdict(results(entry("pre-ln", 3.0, 3.1, rates=[0.001, 0.002, 0.004]), other))
    assert "`--lrs 0.001 0.002 0.004 0.01 0.02 0.04 0.08`" in text


def test_one_learning_rate_is_called_untuned() -> None:
    text = verdict(results(entry("pre-ln", 3.0, 3.1), entry("cay", 2.9, 3.05), lrs=(0.003,)))
    assert "at the one learning rate 0.003" in text and "`--lrs 0.001 0.003 0.009`" in text


def test_seeds_that_change_nothing_are_reported() -> None:
    text = verdict(results(entry("pre-ln", 3.0, 3.0, 3.0), entry("cay", 2.9, 3.05, 3.0)))
    assert "All seeds of pre-ln gave exactly the same loss" in text


@settings(max_examples=60)
@given(st.lists(st.lists(st.one_of(st.none(), losses), min_size=1, max_size=4), min_size=1, max_size=4))
def test_verdict_and_summary_hold_for_any_mixture_of_outcomes(table: list[list[float | None]]) -> None:
    filled = results(*(entry(f"scheme{i}", *values) for i, values in enumerate(table)))
    json.dumps(filled, allow_nan=False)
    text = verdict(filled)
    assert "nan" not in text and "inf" not in text and "None" not in text


def test_missing_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ImportError, match=r'pip install "spheret\[report\]"'):
        mean_interval([1.0, 2.0])
