"""The protocol of a tokenizer, and the encoding of whole corpora in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]
Label = TypeVar("Label")

# Pieces bound the memory of one call. A batch of several gives every thread of the library some work.
PIECE_CHARACTERS = 2**18
BATCH_CHARACTERS = 2**20
# One white-space character between two others: GPT-2's pattern always starts a new word there, so a cut changes no
# token. Longer runs of white space do not work: the pattern looks past their end.
_SAFE_CUT = re.compile(r"(?<=\S)(?:\n(?=\S)|(?= \S))")


class Tokenizer(Protocol):
    """Text to ids and back; ``decode(encode(text)) == text`` for every text that UTF-8 can hold.

    Ordinary text never encodes to ``eot_id``, the id that follows each document, not even if it spells
    ``<|endoftext|>``.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eot_id(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary: equal for two tokenizers that give the same ids the same meaning."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """One 1-d integer array per text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Never raises: separators and ids outside the vocabulary give no text, broken UTF-8 gives U+FFFD."""
        ...

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Bytes of text that each id stands for, shape (vocab_size,); 0 for the separator."""
        ...


def encode_documents(tokenizer: Tokenizer, documents: Iterable[tuple[Label, str]]) -> Iterator[tuple[Label, Ids]]:
    """``(label, ids)`` in order, the separator after each document. A long document may come as several arrays."""
    batch: list[tuple[Label, str, bool]] = []
    characters = 0
    for label, text in documents:
        pieces = split_text(text)
        for index, piece in enumerate(pieces):
            batch.append((label, piece, index == len(pieces) - 1))
            characters += len(piece)
            if characters >= BATCH_CHARACTERS:
                yield from _encode(tokenizer, batch)
                batch, characters = [], 0
    yield from _encode(tokenizer, batch)


def split_text(text: str, limit: int = PIECE_CHARACTERS) -> list[str]:
    """``text`` in pieces of about ``limit`` characters, longer where there is no white space.

    The ids of the pieces, joined, are those of the whole text.
    """
    pieces, start = [], 0
    while len(text) - start > limit and (match := _SAFE_CUT.search(text, start + limit)):
        pieces.append(text[start : match.end()])
        start = match.end()
    return [*pieces, text[start:]]


def _encode(tokenizer: Tokenizer, batch: list[tuple[Label, str, bool]]) -> Iterator[tuple[Label, Ids]]:
    end = np.array([tokenizer.eot_id], np.uint32)
    encoded = tokenizer.encode_batch([piece for _, piece, _ in batch])
    for (label, _, last), ids in zip(batch, encoded, strict=True):
        yield label, np.concatenate([ids, end]) if last else ids
