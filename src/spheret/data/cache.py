"""The cache of prepared data: find an intact folder, and move a finished one into place in one atomic step."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from spheret.data.dataset import MANIFEST, TRAIN, VAL, Dataset
from spheret.data.tokenization.build import FILE_NAME

# Longer than any preparation should take: a younger temporary folder may belong to a process that still writes.
_ABANDONED_AFTER_SECONDS = 24 * 3600


def cache_folder(cache: str | None = None) -> Path:
    """The folder ``datasets`` in ``cache``, else in ``$SPHERET_CACHE``, else in ``~/.cache/spheret``."""
    return Path(cache or os.environ.get("SPHERET_CACHE") or "~/.cache/spheret").expanduser() / "datasets"


def open_sound(folder: Path, fingerprint: str) -> Dataset | None:
    """The data set in ``folder`` if it has this fingerprint and every byte is intact, else None."""
    try:
        # Read every byte: a changed id would not fail, it would only make the model worse.
        dataset = Dataset.open(folder, verify=True)
    except (OSError, ValueError):
        return None
    return dataset if dataset.fingerprint == fingerprint else None


def publish(temporary: Path, target: Path, fingerprint: str) -> None:
    """Renames the finished folder ``temporary`` to ``target``; keeps an intact data set that is already there.

    Raises OSError if the target cannot be replaced.
    """
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
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
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
    own = {MANIFEST, TRAIN, VAL, FILE_NAME}
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in own):
        raise FileExistsError(f"{folder} holds {foreign} beside a data set: give a new folder or move them away")


def sweep(folder: Path) -> None:
    """Removes temporary folders in the cache whose process was killed more than a day ago."""
    for path in folder.glob(".*.tmp"):
        try:
            if path.is_dir() and time.time() - path.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process removed it first
