"""JSON, one document per object: lines of objects (.jsonl, .ndjson), or one array of objects (.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spheret.data.sources.opening import DamagedFile, open_bytes
from spheret.data.sources.text import other_encoding

_LOOKED_AT = 2**16  # bytes at the start of a damaged file


def read_jsonl(path: Path, column: str) -> Iterator[str]:
    """The text in field ``column`` of every line, in order, "" for null; blank lines are skipped.

    Raises ValueError for a bad line (with its number), a missing column (listing the present ones) and a broken
    archive.
    """
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _text(_parse(line, where), column, where, "line")


def read_json(path: Path, column: str) -> Iterator[str]:
    """As ``read_jsonl``, for a file that is an array of objects, one object, or lines of objects, as .json files are.

    An array is held in memory as a whole.
    """
    with open_bytes(path) as file:
        line = next((line for line in file if line.strip()), b"")
        if not line:
            return
        first = line.lstrip(b"\xef\xbb\xbf \t\r\n")
        whole = first.startswith(b"[") or (first.startswith(b"{") and not _is_json(line))
        content = line + file.read() if whole else b""
    if not whole:
        yield from read_jsonl(path, column)
        return
    rows = _parse(content, str(path))
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield _text(row, column, f"{path}, row {number}", "row")


def holds_rows(path: Path, column: str) -> bool:
    """Whether the first row of a .json file has text in ``column``: many such files are settings, not corpora.

    True for a damaged file that mentions ``column`` or cannot be decompressed: reading it raises the error.
    """
    try:
        return next(read_json(path, column), None) is not None
    except DamagedFile:
        return _mentions(path, column)
    except ValueError:
        return False


def _mentions(path: Path, column: str) -> bool:
    try:
        with open_bytes(path) as file:
            start = file.read(_LOOKED_AT)
    except DamagedFile:
        return True
    return json.dumps(column).encode() in start.replace(b"\0", b"")  # without its zeros, UTF-16 reads like ASCII


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


def _parse(raw: bytes, where: str) -> Any:
    """The value. Raises DamagedFile, which says what is wrong ``where``."""
    try:
        # utf-8-sig drops the byte-order mark that some editors put at the start of a file.
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{where}: byte {error.start} is not UTF-8{_conversion(raw)}") from error
    except json.JSONDecodeError as error:
        if other_encoding(raw):
            raise DamagedFile(f"{where}: not UTF-8{_conversion(raw)}") from error
        raise DamagedFile(
            f"{where}: not JSON ({error.msg}, column {error.colno}); every line must be one object"
        ) from error
    except RecursionError as error:
        raise DamagedFile(f"{where}: JSON that is nested too deeply to read; flatten or remove it") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise DamagedFile(f"{where}: {error}; write that number as text, or remove it") from error


def _conversion(raw: bytes) -> str:
    encoding = other_encoding(raw)
    return f" but {encoding}: iconv -f {encoding} -t UTF-8" if encoding else "; convert the file to UTF-8"


def _text(row: Any, column: str, where: str, unit: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: a {type(row).__name__}, not an object; every {unit} must look like {{{column!r}: ...}}"
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
            f"{where}: half of a surrogate pair at character {error.start} is not text; repair the {unit}"
        ) from error
    return text or ""
