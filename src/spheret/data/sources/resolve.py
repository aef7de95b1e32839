"""From the entries of ``DataConfig.data`` to files, and from files to documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spheret.data.sources.jsonl import read_jsonl
from spheret.data.sources.parquet import read_parquet
from spheret.data.sources.stdlib import stdlib_files, stdlib_revision
from spheret.data.sources.text import read_text

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.xz": "jsonl",
    ".parquet": "parquet",
}
# Well-known corpora that are not downloaded here. The error message for these names says what to do instead.
HUB_NAMES = ("fineweb-edu", "fineweb", "openwebtext")


@dataclass(frozen=True)
class Source:
    """One entry of ``DataConfig.data``: its name without folders, its files in reading order, its revision if known."""

    name: str
    files: tuple[Path, ...]
    revision: str | None = None

    def documents(self, column: str) -> Iterator[str]:
        """All documents in order; ``column`` is the text field of .jsonl and .parquet rows."""
        for path in self.files:
            yield from read_documents(path, column)

    def describe(self) -> dict[str, Any]:
        """Manifest entry: file count, bytes on disk, and one SHA-256 over kinds and contents (not over file names)."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(f"{_kind(path)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        size = sum(path.stat().st_size for path in self.files)
        kinds = "+".join(sorted({str(_kind(path)) for path in self.files}))
        return {
            "name": self.name,
            "kind": kinds,
            "revision": self.revision,
            "files": len(self.files),
            "bytes": size,
            "sha256": digest.hexdigest(),
        }


def resolve(entries: Iterable[str]) -> tuple[Source, ...]:
    """The sources that ``DataConfig.data`` names.

    Raises FileNotFoundError for a missing path or a folder without readable files, ValueError for an unknown suffix or
    an empty file.
    """
    return tuple(_resolve(entry) for entry in entries)


def read_documents(path: Path, column: str) -> Iterator[str]:
    """The documents of one file, by its suffix. Raises ValueError for an unknown suffix."""
    kind = _kind(path)
    if kind == "jsonl":
        return read_jsonl(path, column)
    if kind == "parquet":
        return read_parquet(path, column)
    if kind == "text":
        return read_text(path)
    raise ValueError(
        f"{path}: unknown kind of file {path.suffix!r}; known are {', '.join(KINDS)}: convert or rename it"
    )


def _resolve(entry: str) -> Source:
    if entry == "stdlib":
        return Source("stdlib", stdlib_files(), stdlib_revision())
    path = Path(entry).expanduser()
    if path.is_dir():
        return Source(path.resolve().name, _folder_files(path))
    if not path.exists():
        hint = "download its .parquet files and give their folder" if entry in HUB_NAMES else "check the path"
        raise FileNotFoundError(f"no corpus {entry!r}: it is neither 'stdlib' nor a file or folder; {hint}")
    if _kind(path) is None:
        read_documents(path, "")  # raises the error for an unknown suffix
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: give a file with text in it, or omit it")
    return Source(path.name, (path,))


def _folder_files(folder: Path) -> tuple[Path, ...]:
    # By parts, because the order of whole paths depends on the system's separator.
    found = [p for p in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).parts) if _readable(p, folder)]
    if any(_kind(path) != "text" for path in found):
        # Beside data files, a README or a loading script describes the corpus and is not part of it.
        found = [path for path in found if path.suffix.lower() not in (".md", ".py")]
    if not found:
        raise FileNotFoundError(f"folder {folder} holds no file with text; known kinds are {', '.join(KINDS)}")
    return tuple(found)


def _readable(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    return not hidden and _kind(path) is not None and path.is_file() and path.stat().st_size > 0


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for suffix, kind in KINDS.items() if name.endswith(suffix)), None)
