"""Files by their suffix: what they hold, and how to read their bytes, compressed or not."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")  # after any suffix but .parquet, which compresses its own pages
KNOWN = f"{', '.join(KINDS)}, and {', '.join(COMPRESSIONS)} after any of them but .parquet"


class DamagedFile(ValueError):
    """A file that is not what its suffix says, or not all of it."""


def kind_of(path: Path) -> str | None:
    """``text``, ``jsonl``, ``json``, ``parquet``, or None for any other file."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        kind = KINDS.get(suffixes[0]) if len(suffixes) == 2 else None
        return None if kind == "parquet" else kind
    return KINDS.get(suffixes[-1]) if suffixes else None


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file.

    Raises DamagedFile, naming the file, for a broken archive, also while the ``with`` block reads; ImportError without
    pyarrow, which reads .zst.
    """
    suffix = path.suffix.lower()
    with path.open("rb") as raw:
        try:
            with _decompressed(raw, suffix, path) as file:
                yield file
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if suffix not in COMPRESSIONS:
                raise
            raise DamagedFile(f"{path} cannot be decompressed ({error}): fetch or compress it again") from error


def _decompressed(raw: IO[bytes], suffix: str, path: Path) -> IO[bytes]:
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if suffix == ".bz2":
        return cast("IO[bytes]", bz2.BZ2File(raw))
    if suffix == ".xz":
        return cast("IO[bytes]", lzma.LZMAFile(raw))
    if suffix != ".zst":
        return raw
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError(f'reading {path} needs pyarrow: pip install "spheret[data]"') from error
    stream: Any = pa.CompressedInputStream(raw, "zstd")
    return cast("IO[bytes]", io.BufferedReader(stream))
