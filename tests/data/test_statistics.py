from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from spheret.data import ByteTokenizer, bytes_in_targets, unigram_loss, write_shard
from spheret.data import statistics as statistics_module


def test_unigram_loss_by_hand(tmp_path: Path) -> None:
    train = write_shard(tmp_path / "a.shard", [np.array([0, 0, 0, 1])], 3)  # smoothed: 4/7, 2/7, 1/7
    expected = -(math.log(4 / 7) + math.log(2 / 7) + 2 * math.log(1 / 7)) / 4
    assert unigram_loss(train, np.array([[0, 1], [2, 2]])) == pytest.approx(expected, rel=1e-12)
    assert unigram_loss(train, np.array([[0, -1], [-1, 0]])) == pytest.approx(-math.log(4 / 7), rel=1e-12)


def test_unigram_counts_the_whole_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 1000)
    train = write_shard(tmp_path / "a.shard", [ids], 50)
    monkeypatch.setattr(statistics_module, "_CHUNK", 64)
    smoothed = (np.bincount(ids, minlength=50) + 1) / 1050
    assert unigram_loss(train, ids) == pytest.approx(-np.log(smoothed[ids]).mean(), rel=1e-12)


def test_targets_are_checked(tmp_path: Path) -> None:
    train = write_shard(tmp_path / "a.shard", [np.array([0, 1])], 3)
    for bad in (3, -2):
        with pytest.raises(ValueError, match=f"target id {bad} is outside the vocabulary of 3"):
            unigram_loss(train, np.array([bad, 0]))
    with pytest.raises(ValueError, match="no token"):
        unigram_loss(train, np.array([-1]))


def test_bits_per_byte_of_a_uniform_byte_model_is_eight() -> None:
    tokenizer = ByteTokenizer()
    targets = np.array([*tokenizer.encode("plain ASCII"), -1])
    nats = len("plain ASCII") * math.log(256)
    assert nats / (math.log(2) * bytes_in_targets(tokenizer, targets)) == pytest.approx(8.0, rel=1e-12)


def test_separators_stand_for_no_bytes() -> None:
    assert bytes_in_targets(ByteTokenizer(), np.array([[97, 256], [256, 98]])) == 2
