"""The source of Python's standard library: a real corpus of about 11 MB that every machine has."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

# Installed packages are not the library, tests would double its size with tables, build files describe one machine.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib"})
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata", "__phello__")


def stdlib_files(root: Path | None = None) -> tuple[Path, ...]:
    """Source files under ``root`` (default: this Python's library), in an order that does not depend on the machine.

    Tests, installed packages, empty files, files that are not UTF-8 and copies are omitted.
    Raises FileNotFoundError if the library has no source.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    seen: set[bytes] = set()
    files = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).parts)
        if _wanted(path, root, seen)
    ]
    if not files:
        raise FileNotFoundError(f"no Python source in {root}: give a text file or folder as data instead of 'stdlib'")
    return tuple(files)


def stdlib_revision() -> str:
    """Implementation and version of this Python, for the manifest."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def _wanted(path: Path, root: Path, seen: set[bytes]) -> bool:
    parts = path.relative_to(root).parts
    if EXCLUDED_FOLDERS.intersection(parts[:-1]) or any(part.startswith(EXCLUDED_PREFIXES) for part in parts):
        return False
    try:
        raw = path.read_bytes()
        raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    # A copy would count its text twice.
    digest = hashlib.sha256(raw).digest()
    if not raw.strip() or digest in seen:
        return False
    seen.add(digest)
    return True
