"""From the entries of ``DataConfig.data`` to files, and from files to documents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spheret.data.sources.jsonl import holds_rows, read_json, read_jsonl
from spheret.data.sources.opening import KNOWN, kind_of
from spheret.data.sources.parquet import read_parquet
from spheret.data.sources.stdlib import stdlib_files, stdlib_revision
from spheret.data.sources.text import SEPARATOR, read_text

# Well-known corpora that are not downloaded here. The error message for these names says what to do instead.
HUB_NAMES = ("fineweb-edu", "fineweb", "openwebtext")
# Files that mark a folder which this package wrote: it is no corpus, even inside one.
_OWN_FOLDERS = {
    "a run": ("config.json", "metrics.jsonl"),
    "a comparison": ("results.json", "runs"),
    "prepared data": ("manifest.json", "train.shard"),
}
_READERS = {
    "text": lambda path, column: read_text(path),
    "jsonl": read_jsonl,
    "json": read_json,
    "parquet": read_parquet,
}
_NAMED = 5  # files that a message names; it counts the others


@dataclass
class Census:
    """What one pass over a corpus met besides its documents."""

    rows: int = 0
    empty_rows: int = 0
    empty_files: list[str] = field(default_factory=list)
    separators: int = 0


@dataclass(frozen=True)
class Source:
    """One entry of ``DataConfig.data``: its name without folders, its files in reading order, its revision if known.

    left_out: what a folder holds besides, each with the reason.
    """

    name: str
    files: tuple[Path, ...]
    revision: str | None = None
    left_out: tuple[tuple[str, str], ...] = ()

    def documents(self, column: str, census: Census | None = None) -> Iterator[str]:
        """All documents in order; ``column`` is the text field of .jsonl, .json and .parquet rows.

        Rows and files without text are skipped, and a text is split at every ``<|endoftext|>``; ``census`` counts both.
        """
        census = Census() if census is None else census
        for path in self.files:
            before = census.rows - census.empty_rows
            for text in read_documents(path, column):
                census.rows += 1
                census.empty_rows += not text
                if SEPARATOR in text:
                    census.separators += text.count(SEPARATOR)
                    # A line end on each side of a separator belongs to it and makes no document of its own.
                    yield from (part for part in text.split(SEPARATOR) if part.strip())
                elif text:
                    yield text
            if census.rows - census.empty_rows == before:
                census.empty_files.append(path.name)

    def describe(self) -> dict[str, Any]:
        """Manifest entry: file count, bytes on disk, and one SHA-256 over kinds and contents (not over file names)."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(f"{kind_of(path)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        size = sum(path.stat().st_size for path in self.files)
        kinds = "+".join(sorted({str(kind_of(path)) for path in self.files}))
        return {
            "name": self.name,
            "kind": kinds,
            "revision": self.revision,
            "files": len(self.files),
            "bytes": size,
            "sha256": digest.hexdigest(),
        }

    def state(self) -> list[tuple[int, ...]]:
        """What the file system says of every file; a write changes it, whatever it does to the times a user can set."""
        stats = (os.stat(path) for path in self.files)
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]

    def notice(self) -> str | None:
        """'corpus leaves out 3 files: a.docx (unknown kind), ...'; None if it leaves out nothing."""
        if not self.left_out:
            return None
        names = [f"{name} ({reason})" for name, reason in self.left_out]
        return f"{self.name} leaves out {counted(len(names), 'entry', 'entries')}: {listed(names)}"


def resolve(entries: Iterable[str], column: str = "text") -> tuple[Source, ...]:
    """The sources that ``DataConfig.data`` names. In a folder, a .json file counts if its first row has ``column``.

    Raises FileNotFoundError for a missing path or a folder without readable files, ValueError for an unknown suffix.
    """
    return tuple(_resolve(entry, column) for entry in entries)


def read_documents(path: Path, column: str) -> Iterator[str]:
    """The text of every row of one file, by its suffix; "" for a row without.

    Raises ValueError for an unknown suffix.
    """
    kind = kind_of(path)
    if kind is None:
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; known are {KNOWN}: convert or rename it")
    return _READERS[kind](path, column)


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def counted(number: int, one: str, many: str) -> str:
    """'1 file' or '3 files'."""
    return f"{number:,} {one if number == 1 else many}"


def _resolve(entry: str, column: str) -> Source:
    if entry == "stdlib":
        return Source("stdlib", stdlib_files(), stdlib_revision())
    path = Path(entry).expanduser()
    if path.is_dir():
        return _folder(path, column)
    if not path.exists():
        hint = "download its .parquet files and give their folder" if entry in HUB_NAMES else "check the path"
        raise FileNotFoundError(f"no corpus {entry!r}: it is neither 'stdlib' nor a file or folder; {hint}")
    if kind_of(path) is None:
        read_documents(path, column)  # raises the error for an unknown suffix
    return Source(path.name, (path,))


def _folder(folder: Path, column: str) -> Source:
    found, left_out = [], []
    for path, reason in _entries(folder, column):
        if reason is None:
            found.append(path)
        elif reason:
            left_out.append((path.relative_to(folder).as_posix(), reason))
    if any(kind_of(path) != "text" for path in found):
        # Beside data files, a README or a loading script describes the corpus and is not part of it.
        beside = [path for path in found if path.suffix.lower() in (".md", ".py")]
        found = [path for path in found if path not in beside]
        left_out += [(path.relative_to(folder).as_posix(), "beside data files") for path in beside]
    if not found:
        others = f"; it holds {listed([f'{name} ({reason})' for name, reason in left_out])}" if left_out else ""
        raise FileNotFoundError(f"folder {folder} holds no file with text{others}; known kinds are {KNOWN}")
    return Source(folder.resolve().name, tuple(found), left_out=tuple(left_out))


def _entries(folder: Path, column: str) -> Iterator[tuple[Path, str | None]]:
    """The files below ``folder`` in reading order, each with the reason for leaving it out: None for a file to read,
    "" for one that nobody would miss."""
    # Sorted by parts, because the order of whole paths depends on the system's separator.
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if path.name.startswith((".", "__pycache__")):
            yield path, ""
        elif path.is_dir() and path.is_symlink():  # it may lead back up
            yield path, "a link to a folder"
        elif path.is_dir():
            own = next((what for what, names in _OWN_FOLDERS.items() if all((path / n).exists() for n in names)), None)
            if own:
                yield path, own
            else:
                yield from _entries(path, column)
        elif not path.is_file() or kind_of(path) is None:
            yield path, "unknown kind"
        elif path.stat().st_size == 0:
            yield path, "empty"
        elif kind_of(path) == "json" and not holds_rows(path, column):
            yield path, f"no rows with {column!r}"
        else:
            yield path, None
