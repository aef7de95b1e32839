"""Plain text (.txt, .md, .py): one file is one document, and a large file is many."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

# Files larger than the first size are cut into documents of the second. This bounds the memory, and lets the split hold
# out a part of a corpus that is one file.
WHOLE_BYTES, PART_BYTES = 2**24, 2**20


def read_text(path: Path, whole_bytes: int = WHOLE_BYTES, part_bytes: int = PART_BYTES) -> Iterator[str]:
    """The documents of one UTF-8 file, with its line endings but without a byte-order mark.

    A file of more than ``whole_bytes`` is cut at line ends into documents of at most ``part_bytes`` (at least 8).
    Raises ValueError for a file without text and for bytes that are not UTF-8 (with the position of the first).
    """
    # One byte more than a whole file has, so that the first read gets all of it and cuts nothing.
    limit = whole_bytes + 1 if path.stat().st_size <= whole_bytes else part_bytes
    empty, rest, offset = True, b"", 0
    with path.open("rb") as file:
        while block := rest + file.read(limit - len(rest)):
            cut = len(block) if len(block) < limit else _last_line_end(block)
            if text := decode_utf8(block[:cut], path, offset):
                empty = False
                yield text
            rest, offset = block[cut:], offset + cut
    if empty:
        raise ValueError(f"{path} is empty: give a file with text in it, or omit it")


def decode_utf8(raw: bytes, path: Path, offset: int = 0) -> str:
    """UTF-8 text of ``raw``, ``offset`` bytes into the file. Raises ValueError with the position of a bad byte."""
    if offset == 0:
        raw, offset = raw.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8) * raw.startswith(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at position {offset + error.start}; "
            f"convert it, for example with: iconv -f LATIN1 -t UTF-8 {path.name}"
        ) from error


def character_start(raw: bytes, position: int) -> int:
    """The last position up to ``position`` at which a UTF-8 character of ``raw`` starts."""
    while position > 0 and position < len(raw) and raw[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _last_line_end(block: bytes) -> int:
    # Without any line end the last byte may belong to a split character: it waits for the next block.
    return block.rfind(b"\n") + 1 or character_start(block, len(block) - 1) or len(block)
