"""Which documents are held out. The text alone decides, so copies of a document are never on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spheret.data.sources.text import character_start

SCORE_RANGE = 2**64


@dataclass(frozen=True)
class Split:
    """A split: documents with a score below ``threshold`` are held out, or the end of a single document is.

    rule: ``by-document`` or ``cut-single-document``.
    """

    rule: str
    fraction: float
    seed: int
    threshold: int
    documents: int

    def sides(self, documents: Iterable[str]) -> Iterator[tuple[bool, str]]:
        """``(is_validation, text)`` in the order of the corpus."""
        for text in documents:
            if self.rule == "by-document":
                yield score(text, self.seed) < self.threshold, text
            else:
                head, tail = cut(text, self.fraction)
                yield False, head
                yield True, tail

    def describe(self) -> dict[str, Any]:
        """The split's entry in the manifest."""
        return {"rule": self.rule, "val_fraction": self.fraction, "seed": self.seed, "corpus_documents": self.documents}


def decide(documents: Iterable[str], fraction: float, seed: int) -> Split:
    """One pass over the corpus that fixes the split; memory does not grow with the corpus.

    Each document's score is a hash of its text, uniform in [0, 2^64); scores below ``fraction`` of that are held out.
    If that leaves a side empty, the document with the smallest score is held out, or the one with the largest is
    kept for training. If the corpus is one document (or copies of one), its last ``fraction`` is held out instead.
    Raises ValueError for a corpus without documents.
    """
    lowest, highest, count = SCORE_RANGE, -1, 0
    for text in documents:
        value = score(text, seed)
        lowest, highest, count = min(lowest, value), max(highest, value), count + 1
    if not count:
        raise ValueError("the corpus holds no document: give files with text in them")
    if lowest == highest:
        return Split("cut-single-document", fraction, seed, 0, count)
    # `lowest + 1` holds out at least one document, and `highest` keeps at least one for training.
    threshold = min(max(int(fraction * SCORE_RANGE), lowest + 1), highest)
    return Split("by-document", fraction, seed, threshold, count)


def score(text: str, seed: int) -> int:
    """A hash of ``(text, seed)`` in [0, 2^64), the same on every machine."""
    # Python's own hash() of a string differs from process to process.
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=str(seed).encode())
    return int.from_bytes(digest.digest(), "big")


def cut(text: str, fraction: float) -> tuple[str, str]:
    """``text`` in two: the tail is about the last ``fraction`` of its bytes, cut at the line end nearest to that point.

    Text of one line is cut between two characters. Raises ValueError for a single character.
    """
    raw = text.encode("utf-8")
    target = len(raw) - round(len(raw) * fraction)
    line_ends = raw.rfind(b"\n", 0, target) + 1, raw.find(b"\n", target) + 1
    places = [place for place in line_ends if 0 < place < len(raw)]
    place = min(places, key=lambda p: abs(p - target)) if places else _between_characters(raw, target)
    return raw[:place].decode("utf-8"), raw[place:].decode("utf-8")


def _between_characters(raw: bytes, target: int) -> int:
    # In UTF-8, every byte of a character but its first has the form 10xxxxxx.
    starts = [place for place in range(1, len(raw)) if raw[place] & 0xC0 != 0x80]
    if not starts:
        raise ValueError(f"the corpus is {raw.decode('utf-8')!r} alone, which cannot be split: give a longer text")
    nearest = character_start(raw, min(max(target, 1), len(raw) - 1))
    return nearest if nearest > 0 else starts[0]
