"""The order in which variants take turns."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from spheret.benchmarking.measuring import balanced_order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 10, 11])
def test_everything_follows_everything_equally_often(n: int) -> None:
    rounds = [balanced_order(range(n), number) for number in range(2 * n)]
    assert all(sorted(turn) == list(range(n)) for turn in rounds)
    pairs = Counter(pair for turn in rounds for pair in itertools.pairwise(turn))
    assert set(pairs.values()) <= {2} and len(pairs) == n * (n - 1)
    places = Counter((place, item) for turn in rounds for place, item in enumerate(turn))
    assert set(places.values()) == {2}


def test_who_comes_before_the_one_before_changes_from_square_to_square() -> None:
    rounds = [balanced_order("abcdefgh", number) for number in range(8 * 16)]
    triples = {(turn[i], turn[i + 2]) for turn in rounds for i in range(6)}
    assert len(triples) == 8 * 7
