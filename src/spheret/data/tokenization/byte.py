"""UTF-8 bytes as tokens: ids 0 to 255 are the bytes, 256 is the document separator.

The separator is not the NUL byte but has an id of its own, so every text decodes unchanged, even one with NULs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from spheret.data.tokenization.base import Ids


class ByteTokenizer:
    """UTF-8 bytes, a vocabulary of 257. It needs no file and no training."""

    name = "bytes"
    vocab_size = 257
    eot_id = 256
    fingerprint = hashlib.sha256(b"spheret bytes 257").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int32]:
        return np.array([1] * 256 + [0], np.int32)
