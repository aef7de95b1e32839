"""Byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909, in GPT-2's form), on the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from spheret.data.tokenization.base import Ids, split_text

# More text hardly changes the merges, and training on all of a large corpus would take hours.
TRAINING_CHARACTERS = 2**28


class ByteLevelBPE:
    """A byte-level BPE.

    Its separator ``eot_id`` is not a special token of the library, which would recognise it in ordinary text.
    """

    def __init__(self, engine: tokenizers.Tokenizer, name: str, eot_id: int) -> None:
        self._engine, self._name, self._eot_id = engine, name, eot_id
        self._vocab: dict[str, int] = {token: i for token, i in engine.get_vocab().items() if i != eot_id}
        self._vocab_size = max(max(self._vocab.values()), eot_id) + 1

    @property
    def name(self) -> str:
        return self._name

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eot_id(self) -> int:
        return self._eot_id

    @property
    def fingerprint(self) -> str:
        entries = sorted(self._vocab.items(), key=lambda entry: entry[1])
        return hashlib.sha256(json.dumps([entries, self._eot_id]).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self._vocab_size and i != self._eot_id]
        return str(self._engine.decode(known, skip_special_tokens=False))

    def token_bytes(self) -> npt.NDArray[np.int32]:
        sizes = np.zeros(self._vocab_size, np.int32)
        for token, i in self._vocab.items():
            sizes[i] = len(token)  # the byte-level alphabet has one character per byte
        return sizes

    def save(self, path: Path) -> None:
        """Writes the ``tokenizers`` JSON file."""
        self._engine.save(str(path))

    @classmethod
    def load(cls, path: Path, name: str, eot_id: int) -> ByteLevelBPE:
        """The inverse of ``save``. Raises FileNotFoundError or ValueError naming the file."""
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer file {path}: prepare the data again")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), name, eot_id)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer file ({error}): prepare the data again") from error


def byte_level_engine(
    vocab: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None
) -> tokenizers.Tokenizer:
    """GPT-2's pipeline around a vocabulary: nothing is normalised, added or lost."""
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges) if vocab else models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    return engine


def train_bpe(texts: Iterable[str], vocab_size: int) -> ByteLevelBPE:
    """Trains on ``texts`` (the first 2^28 characters): the same texts give the same tokenizer.

    The last id is the separator. There are fewer ids than ``vocab_size`` if the texts run out of pairs to merge.
    """
    engine = byte_level_engine()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        # All 256 bytes, so that every text can be encoded; sorted, because the library lists them in no fixed order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(_limited(texts), trainer)
    return ByteLevelBPE(engine, f"bpe:{vocab_size}", engine.get_vocab_size())


def _limited(texts: Iterable[str]) -> Iterator[str]:
    budget = TRAINING_CHARACTERS
    for text in texts:
        for piece in split_text(text):
            yield piece
            budget -= len(piece)
            if budget <= 0:
                return
