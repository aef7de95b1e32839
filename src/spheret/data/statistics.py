"""Figures to compare a model's loss with: the unigram loss, and the bytes of text that the targets stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spheret.data.shards import Shard
from spheret.data.tokenization.base import Tokenizer

_CHUNK = 2**22  # ids counted at a time: bincount copies them to int64, 32 MiB


def unigram_loss(train: Shard, targets: npt.NDArray[Any]) -> float:
    """Cross entropy on ``targets`` of the training shard's token frequencies, in nats per token.

    targets: ids of any shape; -1 is ignored.
    This is the loss of the best model that ignores the context: a run that stays there has learned frequencies only.
    Each count is increased by one, so that a token that training never saw has a finite loss.
    Raises ValueError without targets, or for a target or an id of the shard outside the vocabulary.
    """
    counts = np.ones(train.vocab_size, np.int64)
    for start in range(0, len(train), _CHUNK):
        piece = train.tokens[start : start + _CHUNK]
        train.check_ids(piece)
        counts += np.bincount(piece, minlength=train.vocab_size)
    ids = _valid(targets, train.vocab_size)
    if ids.size == 0:
        raise ValueError("targets hold no token: give at least one validation window")
    return float(np.log(counts.sum()) - np.log(counts[ids]).mean())


def bytes_in_targets(tokenizer: Tokenizer, targets: npt.NDArray[Any]) -> int:
    """UTF-8 bytes of text that ``targets`` (any shape; -1 is ignored) stand for; document separators count 0.

    Bits per byte = summed loss in nats / (ln 2 * this). Raises ValueError for a target outside the vocabulary.
    """
    return int(tokenizer.token_bytes()[_valid(targets, tokenizer.vocab_size)].sum(dtype=np.int64))


def _valid(targets: npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(targets).reshape(-1)
    valid: npt.NDArray[np.int64] = ids[ids != -1].astype(np.int64)
    if valid.size and (valid.min() < 0 or valid.max() >= vocab_size):
        bad = int(valid.min()) if valid.min() < 0 else int(valid.max())
        raise ValueError(
            f"target id {bad} is outside the vocabulary of {vocab_size}: use the tokenizer of the data set"
        )
    return valid
