"""JSON lines (.jsonl, also .gz and .xz): one object per line, one document per object."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast


def read_jsonl(path: Path, column: str) -> Iterator[str]:
    """The texts in field ``column``, in order; blank lines, nulls and empty texts are skipped.

    Raises ValueError for a bad line (with its number), a missing column (listing the present ones), a broken archive
    and a file without text.
    """
    empty = True
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (text := _text(line, column, f"{path}, line {number}")):
                    empty = False
                    yield text
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}): fetch or compress it again") from error
    if empty:
        raise ValueError(f"{path} holds no text in column {column!r}: give a file with text in it, or omit it")


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return cast("IO[bytes]", lzma.open(path, "rb")) if path.suffix.lower() == ".xz" else path.open("rb")


def _text(line: bytes, column: str, where: str) -> str | None:
    try:
        # utf-8-sig drops the byte-order mark that some editors put at the start of a file.
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); every line must be one object"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: a {type(row).__name__}, not an object; every line must look like {{{column!r}: ...}}"
        )
    if column not in row:
        raise ValueError(f"{where}: no column {column!r}; the columns are {list(row)}: set text_column to one of them")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f"{where}: column {column!r} holds a {type(text).__name__}, not text: set text_column to another"
        )
    # JSON can spell half of a surrogate pair ("\ud800"). UTF-8 cannot, and the split hashes UTF-8.
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: half of a surrogate pair at character {error.start} is not text; repair the line"
        ) from error
    return text
