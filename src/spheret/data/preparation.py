"""Corpus to tokenised shards, once: later calls find them by the fingerprint of corpus, tokenizer and split."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from spheret.data.cache import (
    UnusableFolder,
    cache_folder,
    open_sound,
    publish,
    publish_into,
    refuse_foreign,
    spare_folder,
    working_folder,
)
from spheret.data.config import DataConfig
from spheret.data.dataset import FORMAT, MANIFEST, TRAIN, VAL, Dataset, settled, shard_folder
from spheret.data.shards import ShardWriter
from spheret.data.sources import SEPARATOR, Census, Source, counted, listed, resolve
from spheret.data.split import Split, decide
from spheret.data.tokenization import Tokenizer, build_tokenizer, encode_documents, identity, save_tokenizer

Progress = Callable[[str], None]
_REPORT_BYTES = 2**26  # text between two lines of progress


def prepare(
    config: DataConfig, *, out: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Dataset:
    """The data set that ``config`` describes: found in the cache (or in the folder ``out``), or else made there.

    The same contents, tokenizer and split have the same fingerprint wherever the files are. Several processes may
    prepare the same data: each writes a temporary folder, the first to finish renames its own into place, and the
    others use that one. A damaged cache entry is made again. A cache that cannot be used is replaced by one in the
    system's temporary folder, with a warning. Memory is bounded by the largest document (a text file above 16 MiB
    counts as many documents) and the largest .json file.

    If ``config.data`` is a folder that ``prepare`` wrote, it is opened and checked.

    out: a folder that is new, empty, or holds this data set. An existing folder is written to in place.
    progress: called with a line of text from time to time.
    Raises FileNotFoundError for missing files, ValueError for contents that cannot be read or that change meanwhile,
    ImportError if pyarrow is needed and missing, FileExistsError if ``out`` holds something else, OSError if ``out``
    cannot be written.
    """
    say = progress or (lambda line: None)
    if shards := shard_folder(config):
        return _open_shards(shards, config, out, say)
    sources = resolve(config.data, config.text_column)
    for notice in filter(None, (source.notice() for source in sources)):
        say(notice)
    corpus = Corpus(sources, [source.state() for source in sources], [source.describe() for source in sources])
    fingerprint = _fingerprint(config, corpus.described)
    if out is not None:
        # Resolved, so that a link stays a link to the folder that is written.
        target = Path(out).expanduser().resolve()
        return _prepare_out(config, corpus, fingerprint, target, say)
    try:
        return _prepare_cached(config, corpus, fingerprint, cache_folder(config.cache), say)
    except UnusableFolder as error:
        spare = spare_folder()
        warnings.warn(f"no cache for prepared data, {spare} is used instead: {error}", stacklevel=2)
    return _prepare_cached(config, corpus, fingerprint, spare, say)


@dataclass(frozen=True)
class Corpus:
    """The sources of a data set, and the state and description of each before it was read."""

    sources: tuple[Source, ...]
    states: list[list[tuple[int, ...]]]
    described: list[dict[str, Any]]

    def check_unchanged(self) -> None:
        """ValueError if a source is not what was described: its fingerprint would stand for another text."""
        for source, before, entry in zip(self.sources, self.states, self.described, strict=True):
            after = source.state()
            # Equal contents now prove nothing: a file that is copied over itself was shorter for a while. But a chmod
            # or a backup's hard link changes the last of the times alone.
            written = [file[:-1] for file in after] != [file[:-1] for file in before]
            if written or (after != before and source.describe() != entry):
                raise ValueError(f"{source.name} changed while it was read: wait until it is complete, then try again")


def _found(dataset: Dataset, say: Progress) -> Dataset:
    say(f"found prepared data in {dataset.path}")
    return dataset


def _open_shards(folder: Path, config: DataConfig, out: str | os.PathLike[str] | None, say: Progress) -> Dataset:
    if out is not None:
        raise ValueError(f"{folder} is prepared already: use it as it is, or copy the folder")
    settled(config)
    dataset = Dataset.open(folder, verify=True)
    say(f"prepared data in {folder}, with tokenizer {dataset.tokenizer.name}")
    return dataset


def _prepare_cached(config: DataConfig, corpus: Corpus, fingerprint: str, folder: Path, say: Progress) -> Dataset:
    if found := open_sound(folder / fingerprint, fingerprint):
        return _found(found, say)
    # In the target's own parent, so on the same file system: only there is a rename atomic.
    with working_folder(folder, fingerprint) as temporary:
        _write(config, corpus, fingerprint, temporary, say)
        publish(temporary, folder / fingerprint, fingerprint)
    return Dataset.open(folder / fingerprint)


def _prepare_out(config: DataConfig, corpus: Corpus, fingerprint: str, target: Path, say: Progress) -> Dataset:
    if found := open_sound(target, fingerprint):
        return _found(found, say)
    refuse_foreign(target, fingerprint)
    # A folder that exists may be a mount point or the current folder, which no other can take the place of.
    inside = target.is_dir()
    try:
        with working_folder(target if inside else target.parent, fingerprint) as temporary:
            _write(config, corpus, fingerprint, temporary, say)
            if inside:
                publish_into(temporary, target)
            else:
                publish(temporary, target, fingerprint)
    except UnusableFolder as error:
        raise OSError(f"{error}: choose another --out, or make room there") from error
    return Dataset.open(target)


def _write(config: DataConfig, corpus: Corpus, fingerprint: str, folder: Path, say: Progress) -> None:
    """Writes the files of the data set into ``folder``."""
    head = {"format": FORMAT, "fingerprint": fingerprint, "sources": corpus.described}
    manifest = {**head, **_build(config, corpus.sources, folder, say), "versions": _versions()}
    corpus.check_unchanged()
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    folder.chmod(0o755)  # a temporary folder is private, but a cache may be shared


def _fingerprint(config: DataConfig, described: list[dict[str, Any]]) -> str:
    facts = {
        "format": FORMAT,
        # Contents and not paths: a corpus that moved is still the same data set.
        "sources": [[entry["files"], entry["sha256"]] for entry in described],
        "tokenizer": identity(config.tokenizer),
        "text_column": config.text_column,
        "val_fraction": config.val_fraction,
        "split_seed": config.split_seed,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _build(config: DataConfig, sources: tuple[Source, ...], folder: Path, say: Progress) -> dict[str, Any]:
    """Writes shards and tokenizer into ``folder``; returns their entries in the manifest."""

    census = Census()

    def documents(counts: Census | None = None) -> Iterator[str]:
        for source in sources:
            yield from source.documents(config.text_column, counts)

    @functools.cache  # a pass over the whole corpus; the training of a tokenizer needs the split too
    def split() -> Split:
        if next(documents(), None) is None:
            names = listed([path.name for source in sources for path in source.files])
            raise ValueError(f"no text in {names} (text column {config.text_column!r}): give files with text in them")
        return decide(documents(), config.val_fraction, config.split_seed)

    def train_texts() -> Iterator[str]:
        return (text for held_out, text in split().sides(documents()) if not held_out)

    say("reading " + ", ".join(source.name for source in sources) + f" with tokenizer {config.tokenizer}")
    # First, so that a missing tokenizer file is noticed before the corpus is read. A bpe calls split() itself.
    tokenizer = build_tokenizer(config.tokenizer, train_texts)
    shards = _write_shards(folder, tokenizer, split(), documents(census), say)
    for line in _remarks(census, sum(len(source.files) for source in sources)):
        say(line)
    share = shards["val"]["bytes"] / (shards["val"]["bytes"] + shards["train"]["bytes"])
    if not 0.5 < share / config.val_fraction < 2:
        say(f"validation holds {share:.1%} of the text, not {config.val_fraction:.1%}: the documents are few or uneven")
    facts = {
        "split": split().describe(),
        "text_column": config.text_column,
        "rows": {"all": census.rows, "empty": census.empty_rows, "separators": census.separators},
    }
    return {"tokenizer": save_tokenizer(tokenizer, folder), **facts, **shards}


def _remarks(census: Census, files: int) -> Iterator[str]:
    """What a user should know about the rows that are no documents."""
    if census.empty_rows:
        yield f"{census.empty_rows:,} of {counted(census.rows, 'row', 'rows')} hold no text and are skipped"
    if census.empty_files:
        names = listed(census.empty_files)
        yield f"{len(census.empty_files):,} of {counted(files, 'file', 'files')} hold no text: {names}"
    if census.separators:
        yield f"split at {counted(census.separators, 'separator', 'separators')} {SEPARATOR} inside the text"


def _write_shards(
    folder: Path, tokenizer: Tokenizer, split: Split, documents: Iterable[str], say: Progress
) -> dict[str, Any]:
    sizes, reported = {False: 0, True: 0}, 0

    def measured() -> Iterator[tuple[bool, str]]:
        nonlocal reported
        for held_out, text in split.sides(documents):
            sizes[held_out] += len(text.encode("utf-8"))
            done = sizes[False] + sizes[True]
            if done - reported >= _REPORT_BYTES:
                say(f"tokenised {done / 1e6:.0f} MB")
                reported = done
            yield held_out, text

    vocab_size, eot_id = tokenizer.vocab_size, tokenizer.eot_id
    with (
        ShardWriter(folder / TRAIN, vocab_size=vocab_size, eot_id=eot_id) as train,
        ShardWriter(folder / VAL, vocab_size=vocab_size, eot_id=eot_id) as val,
    ):
        for held_out, ids in encode_documents(tokenizer, measured()):
            (val if held_out else train).append(ids)
    return {"train": _describe(train, sizes[False]), "val": _describe(val, sizes[True])}


def _describe(shard: ShardWriter, text_bytes: int) -> dict[str, Any]:
    return {"tokens": shard.n_tokens, "documents": shard.n_documents, "bytes": text_bytes, "sha256": shard.sha256}


def _versions() -> dict[str, str | None]:
    try:
        own: str | None = importlib.metadata.version("spheret")
    except importlib.metadata.PackageNotFoundError:
        own = None  # run from a checkout
    python, library = platform.python_version(), str(tokenizers.__version__)
    return {"spheret": own, "python": python, "numpy": np.__version__, "tokenizers": library}
