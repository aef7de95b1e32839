from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.data.split import cut, decide

DOCUMENTS = st.lists(st.text(alphabet="abc\né😀", min_size=1, max_size=6), min_size=1, max_size=30)


@given(DOCUMENTS, st.floats(0.001, 0.999), st.integers(0, 2**70))
def test_both_sides_hold_something_and_share_nothing(texts: list[str], fraction: float, seed: int) -> None:
    if len(set(texts)) == 1:
        texts = [*texts, texts[0] + "x"]
    split = decide(texts, fraction, seed)
    sides = list(split.sides(texts))
    held_out = {text for side, text in sides if side}
    trained = {text for side, text in sides if not side}
    assert [text for _, text in sides] == texts
    assert held_out and trained and not held_out & trained


def test_the_share_is_about_the_fraction() -> None:
    texts = [str(i) for i in range(5000)]
    held_out = sum(side for side, _ in decide(texts, 0.1, 0).sides(texts))
    assert 400 < held_out < 600


def test_a_documents_side_does_not_depend_on_the_others() -> None:
    texts = [str(i) for i in range(1000)]
    whole = dict((text, side) for side, text in decide(texts, 0.1, 0).sides(texts))
    part = dict((text, side) for side, text in decide(texts[::3], 0.1, 0).sides(texts[::3]))
    assert part == {text: whole[text] for text in part}


def test_the_seed_chooses_other_documents() -> None:
    texts = [str(i) for i in range(1000)]
    chosen = [{text for side, text in decide(texts, 0.1, seed).sides(texts) if side} for seed in (0, 1)]
    assert chosen[0] != chosen[1]


def test_copies_of_one_document_are_cut_alike() -> None:
    split = decide(["one\ntwo\nthree\n"] * 2, 0.4, 0)
    assert split.rule == "cut-single-document"
    assert list(split.sides(["one\ntwo\nthree\n"] * 2)) == [(False, "one\ntwo\n"), (True, "three\n")] * 2


@given(st.text(min_size=2), st.floats(0.001, 0.999))
def test_a_cut_loses_nothing(text: str, fraction: float) -> None:
    head, tail = cut(text, fraction)
    assert head and tail and head + tail == text


def test_a_cut_falls_on_the_nearest_line_end() -> None:
    lines = [f"line {i:03}\n" for i in range(100)]
    head, tail = cut("".join(lines), 0.1)
    assert head == "".join(lines[:90]) and tail == "".join(lines[90:])


def test_what_cannot_be_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="'é' alone"):
        cut("é", 0.5)
    with pytest.raises(ValueError, match="no document"):
        decide([], 0.1, 0)
