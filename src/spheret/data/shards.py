"""Token shards: one file with a 256-byte header and the ids, read through a memory map.

Header (little endian): magic ``SPHERET\\0``, version u32, bytes per id u32 (2 or 4), vocabulary u64, tokens u64,
documents u64, SHA-256 of the ids (32 bytes), zeros, and in the last four bytes a CRC-32 of the header before them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"SPHERET\0"
VERSION = 1
HEADER_BYTES = 256  # leaves room for later fields, and keeps the ids aligned in the map
_LAYOUT = struct.Struct("<8sIIQQQ32s")
_CRC_AT = HEADER_BYTES - 4
_CHUNK = 2**22  # ids looked at a time, so that a large shard need not fit into memory

Ids = npt.NDArray[Any]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """uint16 up to a vocabulary of 65,535, uint32 above. Raises ValueError outside [1, 2^32]."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must lie between 1 and 2^32")
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


@dataclass(frozen=True)
class Shard:
    """A finished shard on disk. Holds no open file: it can be pickled and shared."""

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int
    n_tokens: int
    n_documents: int
    sha256: str

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> Shard:
        """Reads and checks the header; ``verify`` also reads the ids (see ``Shard.verify``).

        Raises FileNotFoundError; ValueError for another kind of file, a newer version, a bad header, a wrong length.
        """
        path = Path(path)
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        shard = _parse(path, header)
        expected, found = HEADER_BYTES + shard.n_tokens * shard.dtype.itemsize, path.stat().st_size
        if found != expected:
            raise ValueError(
                f"{path} has {found} bytes instead of {expected}: it is truncated or damaged; prepare it again"
            )
        if verify:
            shard.verify()
        return shard

    @property
    def tokens(self) -> Ids:
        """The ids, shape (n_tokens,), read-only.

        Each access maps the file anew. The pages of a map that is kept would add up in the memory of the process.
        """
        if self.n_tokens == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", HEADER_BYTES, (self.n_tokens,))

    def __len__(self) -> int:
        return self.n_tokens

    def verify(self) -> None:
        """Reads every byte. Raises ValueError if one changed since the shard was written, or an id is out of range."""
        with self.path.open("rb") as file:
            if _parse(self.path, file.read(HEADER_BYTES)) != self:
                raise ValueError(f"{self.path} was replaced after it was opened: open it again")
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise ValueError(
                f"{self.path} is damaged: SHA-256 {found[:16]}.. instead of {self.sha256[:16]}..; prepare it again"
            )
        self.check_ids(self.tokens)

    def check_ids(self, ids: Ids) -> None:
        """Raises ValueError if one of ``ids``, read from this shard, is outside its vocabulary."""
        highest = max((int(ids[i : i + _CHUNK].max()) for i in range(0, len(ids), _CHUNK)), default=0)
        if highest >= self.vocab_size:
            raise ValueError(
                f"{self.path} holds token id {highest}, but its vocabulary has {self.vocab_size} ids (0 to "
                f"{self.vocab_size - 1}): prepare it again"
            )


class ShardWriter:
    """Writes a shard piece by piece. The file gets its name only if the ``with`` block ends without an exception.

    eot_id: the id that ends a document; its occurrences are counted as documents.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocab_size: int, eot_id: int | None = None) -> None:
        self.path = Path(path)
        self.dtype = dtype_for(vocab_size)
        self.vocab_size, self.eot_id = vocab_size, eot_id
        self.n_tokens = self.n_documents = 0
        self._hash = hashlib.sha256()
        # A random part, so that two writers of the same shard do not write into each other's file.
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:12]}.tmp")

    def __enter__(self) -> ShardWriter:
        self._file = self._temporary.open("wb", buffering=2**20)
        self._file.write(bytes(HEADER_BYTES))  # filled in by __exit__, when the counts and the hash are known
        return self

    def append(self, ids: Ids) -> None:
        """Adds integer ids, shape (n,).

        Raises ValueError for an id outside [0, vocab_size), TypeError for anything but a 1-d integer array.
        """
        ids = np.asarray(ids)
        if ids.size == 0:
            return
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"token ids must be a 1-d integer array, not {ids.dtype} of shape {ids.shape}")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise ValueError(
                f"token id {bad} is outside the vocabulary of {self.vocab_size}: use the tokenizer's own vocab_size"
            )
        payload = ids.astype(self.dtype).tobytes()
        self._hash.update(payload)
        self._file.write(payload)
        self.n_tokens += ids.size
        if self.eot_id is not None:
            self.n_documents += int(np.count_nonzero(ids == self.eot_id))

    @property
    def sha256(self) -> str:
        """Hash of the ids so far."""
        return self._hash.hexdigest()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.seek(0)
                self._file.write(self._header())
                self._file.flush()
                # Contents before name: after a power failure, the name must not stand on an incomplete file.
                os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                os.replace(self._temporary, self.path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _header(self) -> bytes:
        counts = self.dtype.itemsize, self.vocab_size, self.n_tokens, self.n_documents
        body = _LAYOUT.pack(MAGIC, VERSION, *counts, self._hash.digest()).ljust(_CRC_AT, b"\0")
        return body + struct.pack("<I", zlib.crc32(body))


def write_shard(
    path: str | os.PathLike[str], chunks: Iterable[Ids], vocab_size: int, *, eot_id: int | None = None
) -> Shard:
    """Writes ``chunks`` (1-d integer arrays), one after the other, atomically. Errors as in ``ShardWriter.append``."""
    with ShardWriter(path, vocab_size=vocab_size, eot_id=eot_id) as writer:
        for chunk in chunks:
            writer.append(chunk)
    return Shard.open(path)


def _parse(path: Path, header: bytes) -> Shard:
    if not header.startswith(MAGIC):
        raise ValueError(
            f"{path} is not a token shard (it does not start with {MAGIC!r}): make one with spheret prepare"
        )
    if len(header) < HEADER_BYTES:
        raise ValueError(f"{path} ends inside its header ({len(header)} of {HEADER_BYTES} bytes): prepare it again")
    _, version, width, vocab_size, n_tokens, n_documents, sha256 = _LAYOUT.unpack_from(header)
    if version > VERSION:
        raise ValueError(
            f"{path} has shard version {version}, but this release reads versions up to {VERSION}: update spheret"
        )
    if zlib.crc32(header[:_CRC_AT]) != struct.unpack_from("<I", header, _CRC_AT)[0]:
        raise ValueError(f"{path} has a damaged header: prepare it again")
    return Shard(path, np.dtype(f"<u{width}"), vocab_size, n_tokens, n_documents, sha256.hex())
