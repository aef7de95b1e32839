"""Plain text (.txt, .md, .py): one file is one document, and a large file is many."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from spheret.data.sources.opening import open_bytes

# GPT-2's separator. As text in a corpus it stands between documents that were written into one file.
SEPARATOR = "<|endoftext|>"
# Files larger than the first size are cut into documents of the second. This bounds the memory, and lets the split hold
# out a part of a corpus that is one file.
WHOLE_BYTES, PART_BYTES = 2**24, 2**20
_COMMON = " \r\n\u3000\u3001\u3002\uff0c"
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_text(path: Path, whole_bytes: int = WHOLE_BYTES, part_bytes: int = PART_BYTES) -> Iterator[str]:
    """The documents of one UTF-8 file, with its line endings but without a byte-order mark; none if it is empty.

    A file of more than ``whole_bytes`` is cut into documents of at most ``part_bytes`` (at least 8), after separators
    or else at line ends.
    Raises ValueError for bytes that are not UTF-8 (with the position of the first) and for a broken archive.
    """
    with open_bytes(path) as file:
        # One byte more than a whole file may have tells the two cases apart. A compressed file does not say its size.
        rest, offset = file.read(whole_bytes + 1), 0
        limit = whole_bytes + 1 if len(rest) <= whole_bytes else part_bytes
        while rest := rest if len(rest) >= limit else rest + file.read(limit - len(rest)):
            block = rest[:limit]
            cut = len(block) if len(block) < limit else _last_end(block)
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
            f"convert it, for example with: iconv -f {_likely_encoding(raw[:4096])} -t UTF-8 {path.name}"
        ) from error


def other_encoding(start: bytes) -> str | None:
    """``UTF-16`` or ``UTF-32`` in iconv's spelling, if the bytes at the start of a file look like it, else None."""
    # UTF-32's mark in little endian begins with UTF-16's, so it comes first.
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    start = start[: 4096 - 4096 % 4]
    for name, zeros in (("UTF-32LE", start[2::4] + start[3::4]), ("UTF-32BE", start[0::4] + start[1::4])):
        if len(zeros) >= 8 and zeros.count(0) > 0.9 * len(zeros):
            return name
    # Most scripts have code points below 0x2000, so that the upper bytes of their units are control characters. Such
    # bytes may also be valid UTF-8. A zero among them (every space has one) tells them from text of very short lines.
    for name, upper in (("UTF-16LE", start[1::2]), ("UTF-16BE", start[0::2])):
        if len(upper) >= 8 and 0 in upper and sum(byte < 0x20 for byte in upper) > 0.7 * len(upper):
            return name
    return None


def _likely_encoding(raw: bytes) -> str:
    """The most likely encoding of text that is not UTF-8, in iconv's spelling."""
    # Chinese, Japanese and Korean in UTF-16: no telling zeros, but spaces, line ends and full stops at even places.
    counts = {
        name: sum(raw[i : i + 2].decode(codec, "replace") in _COMMON for i in range(0, len(raw) - 1, 2))
        for name, codec in (("UTF-16LE", "utf-16-le"), ("UTF-16BE", "utf-16-be"))
    }
    name = max(counts, key=counts.__getitem__)
    return name if counts[name] > len(raw) / 400 else "LATIN1"


def character_start(raw: bytes, position: int) -> int:
    """The last position up to ``position`` at which a UTF-8 character of ``raw`` starts."""
    while position > 0 and position < len(raw) and raw[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _last_end(block: bytes) -> int:
    if (separator := block.rfind(SEPARATOR.encode())) >= 0:
        return separator + len(SEPARATOR)
    # Without any line end the last bytes may belong to a split character or separator: they wait for the next block.
    limit = len(block) - (len(SEPARATOR) if len(block) > 2 * len(SEPARATOR) else 1)
    return block.rfind(b"\n") + 1 or character_start(block, limit) or len(block)
