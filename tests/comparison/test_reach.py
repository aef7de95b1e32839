"""The learning rates at which a scheme trains, and the steps to the baseline's loss."""

from __future__ import annotations

from typing import Any

import pytest

from spheret.comparison.reach import (
    RateRange,
    first_below,
    mean_curve,
    rates_that_train,
    with_to_baseline,
)
from spheret.comparison.statistics import summarise
from spheret.comparison.verdict import range_words, verdict

BAD = {"diverged": {"outcome": "diverged", "val_loss": None}, "collapsed": {"collapsed": True}}
INTERRUPTED = {"outcome": "interrupted", "val_loss": None}


def entry(losses: dict[float, float | str], seeds: list[str] | None = None, **extra: Any) -> dict[str, Any]:
    """A scheme with these tuning losses by rate, where a word is a failure; seeds ran at its best rate."""

    def run(lr: float, loss: float | str) -> dict[str, Any]:
        found = {"lr": lr, "seed": 0, "outcome": "finished", "val_loss": 2.0}
        return found | ({"val_loss": loss} if isinstance(loss, float) else BAD.get(loss, INTERRUPTED))

    tuning = [run(lr, loss) for lr, loss in losses.items()]
    best = min(losses, key=lambda lr: losses[lr] if isinstance(losses[lr], float) else 99.0)  # type: ignore[arg-type, return-value]
    return {
        "scheme": "pre-ln", "lr": best, "rates": list(losses), "tuning": tuning,
        "runs": [run(best, 2.0 if word == "ok" else word) | {"seed": i} for i, word in enumerate(seeds or [], 1)],
    } | extra  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "expected", "words"),
    [
        ({1.0: 2.2, 2.0: 2.04, 4.0: 2.0, 8.0: 2.06}, RateRange(2.0, 4.0), "2 to 4 (2x)"),
        ({1.0: 2.0, 2.0: 2.01, 4.0: 2.3}, RateRange(1.0, 2.0, open_low=True), "1 or less to 2 (at least 2x)"),
        ({1.0: 2.3, 2.0: 2.0, 4.0: 2.04}, RateRange(2.0, 4.0, open_high=True), "2 to 4 or more (at least 2x)"),
        ({1.0: 2.3, 2.0: 2.0, 4.0: 2.3}, RateRange(2.0, 2.0), "2 only"),
        ({1.0: 2.3, 2.0: 2.0}, RateRange(2.0, 2.0, open_high=True), "2 or more"),
        # A gap ends the range, whatever lies beyond it.
        ({1.0: 2.01, 2.0: "diverged", 4.0: 2.0, 8.0: 2.1}, RateRange(4.0, 4.0), "4 only"),
        # A collapsed run has a loss, but it does not train.
        ({1.0: 2.3, 2.0: 2.01, 4.0: "collapsed", 8.0: 2.5}, RateRange(2.0, 2.0), "2 only"),
        ({1.0: "collapsed", 2.0: "diverged"}, RateRange(None, None), "none"),
    ],
)
def test_the_range_is_the_stretch_around_the_best_rate(losses: Any, expected: RateRange, words: str) -> None:
    found = rates_that_train(entry(losses))
    assert found == expected and range_words(found) == words
    assert rates_that_train(entry(dict(sorted(losses.items(), reverse=True)))) == expected


@pytest.mark.parametrize("failure", BAD)
def test_a_seed_that_fails_at_the_best_rate_counts(failure: str) -> None:
    losses: Any = {1.0: 2.2, 2.0: 2.0, 4.0: 2.01}
    assert rates_that_train(entry(losses, ["ok", "ok"])) == RateRange(2.0, 4.0, open_high=True)
    assert rates_that_train(entry(losses, ["ok", failure])) == RateRange(None, None)
    assert rates_that_train(entry(losses, ["ok", "stopped by the user"])) == RateRange(2.0, 4.0, open_high=True)


def test_nothing_is_said_of_a_single_rate_or_of_a_grid_that_is_not_done() -> None:
    assert rates_that_train(entry({1.0: 2.0})) is None
    assert rates_that_train({"scheme": "pre-ln", "runs": []}) is None
    assert rates_that_train(entry({1.0: 2.0, 2.0: "stopped by the user"})) is None
    assert rates_that_train(entry({1.0: 2.0, 2.0: 2.1}, rates=[1.0, 2.0, 4.0])) is None


def test_the_first_crossing_is_interpolated() -> None:
    curve = [(100, 4.0), (200, 3.0), (300, 2.0), (400, 2.5), (500, 1.0)]
    assert first_below(curve, 2.5) == pytest.approx(250)
    assert first_below(curve, 3.0) == 200
    assert first_below(curve, 4.5) == 100, "reached by the first evaluation"
    assert first_below(curve, 0.9) is None
    assert first_below([], 1.0) is None


def test_a_mean_curve_has_the_evaluations_that_all_runs_share() -> None:
    assert mean_curve([[(1, 4.0), (2, 3.0), (3, 2.0)], [(2, 1.0), (3, 1.0)]]) == [(2, 2.0), (3, 1.5)]
    assert mean_curve([]) == []


def finished(scheme: str, *losses: float, flops: int = 6) -> dict[str, Any]:
    runs = [{"seed": i, "outcome": "finished", "val_loss": x} for i, x in enumerate(losses, 1)]
    return {"scheme": scheme, "runs": runs, "flops_per_token": flops}


def test_steps_and_flops_to_the_loss_of_the_baseline() -> None:
    schemes = summarise([finished("pre-ln", 2.0, 2.2), finished("proj", 1.0, 1.2, flops=9), finished("keel", 2.4, 2.4)])
    curves = {
        "pre-ln": [[(10, 4.0), (20, 3.0), (40, 2.0)], [(10, 4.2), (20, 3.2), (40, 2.2)]],
        "proj": [[(10, 3.1), (20, 1.1), (40, 1.0)], [(10, 3.1), (20, 1.1), (40, 1.2)]],
        "keel": [[(10, 4.0), (40, 2.4)]],
    }
    base, proj, keel = (e["to_baseline"] for e in with_to_baseline(schemes, curves, tokens_per_step=5))
    assert base == {"steps": 8.0, "tokens": 40.0, "flops": 240.0, "share": 1.0, "flops_share": 1.0}
    # 2.1 lies half way between the evaluations at 10 and 20 tokens.
    assert proj == pytest.approx({"steps": 3.0, "tokens": 15.0, "flops": 135.0, "share": 0.375, "flops_share": 0.5625})
    assert set(keel.values()) == {None}, "never"


def test_where_nothing_is_known_nothing_is_said() -> None:
    schemes = summarise([finished("pre-ln", 2.0), finished("proj", 1.0)])
    once = {"pre-ln": [[(40, 2.0)]], "proj": [[(40, 1.0)]]}  # evaluated only at the end
    assert [e["to_baseline"] for e in with_to_baseline(schemes, once, 5)] == [None, None]
    lost = summarise([finished("pre-ln"), finished("proj", 1.0)])
    assert [e["to_baseline"] for e in with_to_baseline(lost, {"proj": [[(10, 2.0), (40, 1.0)]]}, 5)] == [None, None]
    assert with_to_baseline([], {}, 5) == []


def test_the_verdict_tells_ranges_and_steps() -> None:
    tuned: Any = {1.0: 2.2, 2.0: 2.0, 4.0: 2.01}
    schemes = summarise(
        [{**finished(name, 2.0, 2.1, 2.2), "tuning": entry(tuned)["tuning"]} for name in ("a", "b", "c")]
    )
    schemes[1]["to_baseline"] = {"share": 0.614, "flops_share": 0.92}
    schemes[2]["to_baseline"] = {"share": None, "flops_share": None}
    text = verdict({"settings": {}, "schemes": schemes})
    assert "a 2 to 4 or more (at least 2x); b 2 to 4 or more (at least 2x); c" in text
    assert "b 61% (92% of the FLOPs), c never." in text
    plain = verdict(
        {"settings": {"lrs": [0.1]}, "schemes": summarise([finished("a", 2.0, 2.1), finished("b", 2.0, 2.2)])}
    )
    assert "Learning rates that" not in plain and "Steps to" not in plain
