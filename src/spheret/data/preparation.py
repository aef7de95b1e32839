"""Corpus to tokenised shards, once: later calls find them by the fingerprint of corpus, tokenizer and split."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from spheret.data.cache import cache_folder, open_sound, publish, refuse_foreign, sweep
from spheret.data.config import DataConfig
from spheret.data.dataset import FORMAT, MANIFEST, TRAIN, VAL, Dataset
from spheret.data.shards import ShardWriter
from spheret.data.sources import Source, resolve
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
    others use that one. A damaged cache entry is made again. Memory is bounded by the largest document (a text file
    above 16 MiB counts as many documents).
    progress: called with a line of text from time to time.
    Raises FileNotFoundError for missing files, ValueError for contents that cannot be read, ImportError if pyarrow is
    needed and missing, FileExistsError if ``out`` holds something else.
    """
    say = progress or (lambda line: None)
    sources = resolve(config.data)
    described = [source.describe() for source in sources]
    fingerprint = _fingerprint(config, described)
    target = Path(out) if out is not None else cache_folder(config.cache) / fingerprint
    if dataset := open_sound(target, fingerprint):
        say(f"found prepared data in {target}")
        return dataset
    target.parent.mkdir(parents=True, exist_ok=True)
    if out is None:
        sweep(target.parent)
    else:
        refuse_foreign(target, fingerprint)
    # In the target's own parent, so on the same file system: only there is a rename atomic.
    temporary = Path(tempfile.mkdtemp(prefix=f".{fingerprint}.", suffix=".tmp", dir=target.parent))
    try:
        head = {"format": FORMAT, "fingerprint": fingerprint, "sources": described}
        manifest = {**head, **_build(config, sources, temporary, say), "versions": _versions()}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp's folders are private, but a cache may be shared
        publish(temporary, target, fingerprint)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Dataset.open(target)


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

    def documents() -> Iterator[str]:
        for source in sources:
            yield from source.documents(config.text_column)

    @functools.cache  # a pass over the whole corpus; the training of a tokenizer needs the split too
    def split() -> Split:
        return decide(documents(), config.val_fraction, config.split_seed)

    def train_texts() -> Iterator[str]:
        return (text for held_out, text in split().sides(documents()) if not held_out)

    say("reading " + ", ".join(source.name for source in sources) + f" with tokenizer {config.tokenizer}")
    # First, so that a missing tokenizer file is noticed before the corpus is read. A bpe calls split() itself.
    tokenizer = build_tokenizer(config.tokenizer, train_texts)
    shards = _write_shards(folder, tokenizer, split(), documents(), say)
    share = shards["val"]["bytes"] / (shards["val"]["bytes"] + shards["train"]["bytes"])
    if not 0.5 < share / config.val_fraction < 2:
        say(f"validation holds {share:.1%} of the text, not {config.val_fraction:.1%}: the documents are few or uneven")
    facts = {"split": split().describe(), "text_column": config.text_column}
    return {"tokenizer": save_tokenizer(tokenizer, folder), **facts, **shards}


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
