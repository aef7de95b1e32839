"""Plain text (.txt, .md, .py): one file is one document, and a large file is many."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from spheret.data.sources.opening import open_bytes

# Files larger than the first size are cut into documents of the second. This bounds the memory, and lets the split hold
# out a part of a corpus that is one file.
WHOLE_BYTES, PART_BYTES = 2**24, 2**20
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_text(path: Path, whole_bytes: int = WHOLE_BYTES, part_bytes: int = PART_BYTES) -> Iterator[str]:
    """The documents of one UTF-8 file, with its line endings but without a byte-order mark; none if it is empty.

    A file of more than ``whole_bytes`` is cut at line ends into documents of at most ``part_bytes`` (at least 8).
    Raises ValueError for bytes that are not UTF-8 (with the position of the first) and for a broken archive.
    """
    with open_bytes(path) as file:
        # One byte more than a whole file may have tells the two cases apart. A compressed file does not say its size.
        rest, offset = file.read(whole_bytes + 1), 0
        limit = whole_bytes + 1 if len(rest) <= whole_bytes else part_bytes
        while rest := rest if len(rest) >= limit else rest + file.read(limit - len(rest)):
            block = rest[:limit]
            cut = len(block) if len(block) < limit else _last_line_end(block)
            if text := decode_utf8(block[:cut], path, offset):
                yield text
            rest, offset = rest[cut:], offset + cut


def decode_utf8(raw: bytes, path: Path, offset: int = 0) -> str:
    """UTF-8 text of ``raw``, ``offset`` bytes into the file. Raises ValueError with the position of a bad byte."""
    if offset == 0:
        if encoding := other_encoding(raw):
            raise ValueError(
                f"{path} looks like {encoding}, not UTF-8; convert it, for example with: "
                f"iconv -f {encoding} -t UTF-8 {path.name}"
            )
        raw, offset = raw.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8) * raw.startswith(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at position {offset + error.start}; "
            f"convert it, for example with: iconv -f LATIN1 -t UTF-8 {path.name}"
        ) from error


def other_encoding(start: bytes) -> str | None:
    """``UTF-16`` or ``UTF-32`` in iconv's spelling, if the bytes at the start of a file look like it, else None."""
    # UTF-32's mark in little endian begins with UTF-16's, so it comes first.
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    # Without a mark, every other byte of mostly Latin text is zero. Such bytes are also valid UTF-8, full of NULs.
    start = start[:4096]
    for name, zeros in (("UTF-16LE", start[1::2]), ("UTF-16BE", start[0::2])):
        if len(zeros) >= 8 and zeros.count(0) > 0.7 * len(zeros):
            return name
    return None


def character_start(raw: bytes, position: int) -> int:
    """The last position up to ``position`` at which a UTF-8 character of ``raw`` starts."""
    while position > 0 and position < len(raw) and raw[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _last_line_end(block: bytes) -> int:
    # Without any line end the last byte may belong to a split character: it waits for the next block.
    return block.rfind(b"\n") + 1 or character_start(block, len(block) - 1) or len(block)
