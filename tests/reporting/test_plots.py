from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spheret.reporting.plots import difference_limits, robust_limits

finite = st.floats(min_value=0.1, max_value=50, allow_nan=False)


def test_one_bad_value_does_not_squeeze_the_others() -> None:
    good = [2.10, 2.11, 2.12, 2.13, 2.14]
    low, high = robust_limits([*good, 9.0])
    assert low < 2.10 and 2.14 < high < 2.4


def test_interval_ends_widen_the_limits_only_so_far() -> None:
    low, high = robust_limits([2.0, 2.1, 2.2], [1.0, 3.0])
    assert 1.8 < low < 1.95 and 2.25 < high < 2.4


@given(st.lists(finite, min_size=1, max_size=12), st.lists(finite, max_size=6))
def test_limits_always_hold_the_best_value_and_have_a_width(core: list[float], others: list[float]) -> None:
    low, high = robust_limits(core, others)
    assert low < min(core) < high


def test_no_values_at_all_still_give_limits() -> None:
    assert robust_limits([]) == (0.0, 1.0)


def test_differences_are_shown_whole_with_zero_in_sight() -> None:
    low, high = difference_limits([[-0.03, -0.06, 0.0], [-0.07, -0.15, 0.0], [-0.08, -0.16, 0.01]])
    assert low < -0.16 and high > 0.01
    low, high = difference_limits([[0.1], [0.2]])
    assert low < 0 and high > 0.2


def test_one_wild_difference_does_not_hide_the_others() -> None:
    low, high = difference_limits([[-0.03, -0.06, 0.0], [-0.07, -0.15, 0.0], [3.0, -20.0, 26.0]])
    assert -1 < low < -0.15 and 0 < high < 1
