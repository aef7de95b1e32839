"""The cache of prepared data: find an intact folder, and move a finished one into place in one atomic step.

A preparation writes into a temporary folder and holds the lock in it, so that another can tell it from the leftovers of
one that was killed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from spheret.data.dataset import MANIFEST, TRAIN, VAL, Dataset
from spheret.data.tokenization.build import FILE_NAME

_LOCK = ".lock"
_OWN = {MANIFEST, TRAIN, VAL, FILE_NAME, _LOCK}
# The name that `working_folder` gives. Temporary folders of other programs end in .tmp too.
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.\w+\.tmp(\.damaged\.tmp)?")
_UNFINISHED = re.compile(r"\..+\.shard\.[0-9a-f]{12}\.tmp")  # the file of a `ShardWriter`
# Every new ext4 disk has one, so a mount point is never quite empty.
_OF_THE_DISK = {"lost+found"}
# Between making its folder and locking it, a preparation looks abandoned.
_YOUNG_SECONDS = 60
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class UnusableFolder(OSError):
    """A folder that does not exist and cannot be made, cannot be written, or whose file system is full."""


def cache_folder(cache: str | None = None) -> Path:
    """The folder ``datasets`` in ``cache``, else in ``$SPHERET_CACHE``, else in ``~/.cache/spheret``.

    Raises UnusableFolder if that is in a home folder and there is none.
    """
    path = Path(cache or os.environ.get("SPHERET_CACHE") or "~/.cache/spheret")
    try:
        return path.expanduser() / "datasets"
    except RuntimeError as error:
        raise UnusableFolder(f"{path}: {error}") from error


def spare_folder() -> Path:
    """A cache in the system's temporary folder, for a process whose own cache cannot be used."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"spheret-{user}" / "datasets"


@contextmanager
def working_folder(parent: Path, fingerprint: str) -> Iterator[Path]:
    """A new temporary folder in ``parent``, locked while the ``with`` block runs and removed after it.

    Raises UnusableFolder if ``parent`` cannot be made or written, or the space runs out.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{fingerprint}.", suffix=".tmp", dir=parent))
    except OSError as error:
        raise UnusableFolder(f"cannot write to {parent} ({error.strerror or error})") from error
    lock = FileLock(temporary / _LOCK)
    # Some file systems of clusters know no locks. Nobody can get this one there, so nobody sweeps the folder away.
    with suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield temporary
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise UnusableFolder(f"no space left in {parent}") from error
    finally:
        lock.release()
        shutil.rmtree(temporary, ignore_errors=True)


def open_sound(folder: Path, fingerprint: str) -> Dataset | None:
    """The data set in ``folder`` if it has this fingerprint and every byte is intact, else None."""
    try:
        # Read every byte: a changed id would not fail, it would only make the model worse.
        dataset = Dataset.open(folder, verify=True)
    except (OSError, ValueError):
        return None
    # Before the manifest counted separators, they were tokenised as text, under the same fingerprint.
    return dataset if dataset.fingerprint == fingerprint and "rows" in dataset.manifest else None


def publish_into(temporary: Path, target: Path) -> None:
    """Moves the files of ``temporary``, a folder inside ``target``, up into it; the manifest, which makes them a data
    set, comes last."""
    (target / MANIFEST).unlink(missing_ok=True)
    for name in (FILE_NAME, TRAIN, VAL, MANIFEST):
        if (temporary / name).exists():
            os.replace(temporary / name, target / name)


def publish(temporary: Path, target: Path, fingerprint: str) -> None:
    """Renames the finished folder ``temporary`` to ``target``; keeps an intact data set that is already there.

    Raises OSError if the target cannot be replaced.
    """
    with suppress(OSError):  # the lock stays held without its file; elsewhere than on Unix the file stays too
        (temporary / _LOCK).unlink()
    # Several processes may find the same damaged folder and race to replace it, so the rename may fail more than once.
    for attempt in range(10):
        try:
            # The one atomic step. It fails if the target is a folder that is not empty.
            os.rename(temporary, target)
            return
        except OSError:
            if open_sound(target, fingerprint):
                return
            if attempt == 9 or not target.is_dir():
                raise
        # What is there is damaged. Moving it away is atomic, deleting it in place is not.
        damaged = temporary.with_name(f"{temporary.name}.damaged.tmp")
        try:
            os.rename(target, damaged)
        except FileNotFoundError:
            continue  # another process moved it away
        shutil.rmtree(damaged, ignore_errors=True)


def refuse_foreign(folder: Path, fingerprint: str) -> None:
    """Raises FileExistsError if ``folder`` holds anything but files of the data set ``fingerprint``."""
    # `publish` deletes a damaged target. It must never delete a user's own files.
    if not folder.exists():
        return
    if folder.is_dir():
        sweep(folder)
        if all(path.name in _OF_THE_DISK for path in folder.iterdir()):
            return
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("fingerprint")
    except (OSError, ValueError, AttributeError):
        found = None
    if found != fingerprint:
        what = f"the data set {found}" if found else "something else"
        raise FileExistsError(
            f"{folder} holds {what}, but this data set is {fingerprint}: give a new folder or empty that one"
        )
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in _OWN | _OF_THE_DISK):
        raise FileExistsError(f"{folder} holds {foreign} beside a data set: give a new folder or move them away")


def sweep(folder: Path) -> None:
    """Removes the temporary folders of preparations that were killed; nothing else, for ``folder`` may be a user's."""
    for path in folder.glob(".*.tmp"):
        try:
            if not _is_leftover(path) or time.time() - path.stat().st_mtime < _YOUNG_SECONDS:
                continue
            with FileLock(path / _LOCK, timeout=0):  # a process that works in the folder holds it
                shutil.rmtree(path, ignore_errors=True)
        except (OSError, Timeout, NotImplementedError):
            continue  # at work, gone, another user's, or on a file system without locks


def _is_leftover(path: Path) -> bool:
    if not _TEMPORARY.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(file.name in _OWN or _UNFINISHED.fullmatch(file.name) for file in path.iterdir())
