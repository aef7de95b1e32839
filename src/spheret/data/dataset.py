"""A prepared data set: a folder with two shards, a manifest and, if it needs one, the tokenizer's file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from spheret.data.config import DataConfig
from spheret.data.shards import Shard
from spheret.data.tokenization import Tokenizer, load_tokenizer, parse_tokenizer

MANIFEST, TRAIN, VAL = "manifest.json", "train.shard", "val.shard"
# Increase it when an older release could no longer read the folder. The fingerprint includes it.
FORMAT = 1


@dataclass(frozen=True)
class Dataset:
    """train, val: the token shards; manifest: ``manifest.json``; fingerprint: hash of corpus, tokenizer and split.

    Raises ValueError if a shard and the tokenizer have vocabularies of different sizes.
    """

    train: Shard
    val: Shard
    tokenizer: Tokenizer
    manifest: dict[str, Any]
    fingerprint: str
    path: Path

    def __post_init__(self) -> None:
        # Ids of another vocabulary would end in an IndexError far from here or, worse, mean other words.
        own = self.tokenizer.vocab_size
        for shard in (self.train, self.val):
            if shard.vocab_size != own:
                raise ValueError(
                    f"{shard.path} was made for a vocabulary of {shard.vocab_size} ids, but the tokenizer "
                    f"{self.tokenizer.name!r} has {own}: prepare the data again with this tokenizer"
                )

    @property
    def name(self) -> str:
        """The sources' names, joined by ``+``."""
        return "+".join(source["name"] for source in self.manifest["sources"])

    def summary(self) -> dict[str, Any]:
        """The entry for the data in run.json."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.tokenizer.vocab_size,
            "train_tokens": len(self.train),
            "val_tokens": len(self.val),
        }

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = False) -> Dataset:
        """Opens a prepared folder; the corpus is not needed. ``verify`` reads every byte (see ``verify``).

        Raises FileNotFoundError for a folder without the files of a data set, ValueError for a newer format or damage.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            tokenizer = load_tokenizer(folder, manifest["tokenizer"])
            train, val = (_open_shard(folder / name, manifest[side]) for name, side in ((TRAIN, "train"), (VAL, "val")))
            dataset = cls(train, val, tokenizer, manifest, manifest["fingerprint"], folder)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / MANIFEST} is incomplete ({error!r}): prepare the data again") from error
        if verify:
            dataset.verify()
        return dataset

    def verify(self) -> None:
        """Reads both shards completely. Raises ValueError, which names the file, if a byte changed."""
        self.train.verify()
        self.val.verify()


def shard_folder(config: DataConfig) -> Path | None:
    """The folder of prepared data that ``config.data`` names, or None if it names a corpus.

    Raises ValueError if it names prepared data beside something else.
    """
    folders = [Path(entry).expanduser() for entry in config.data]
    # One shard is enough: with the other missing, the folder is damaged, and no corpus.
    prepared = [
        folder
        for folder in folders
        if (folder / MANIFEST).is_file() and any((folder / s).is_file() for s in (TRAIN, VAL))
    ]
    if prepared and len(folders) > 1:
        raise ValueError(
            f"{prepared[0]} is prepared data, which stands alone: give it without {len(folders) - 1} other entries, or "
            "prepare all the text together"
        )
    return prepared[0] if prepared else None


def settled(config: DataConfig) -> DataConfig:
    """``config`` with the tokenizer, split and text column of the prepared data that it names, if it names any.

    Raises ValueError if ``config`` asks for others, ones that are not the defaults.
    """
    folder = shard_folder(config)
    if folder is None:
        return config
    manifest = _read_manifest(folder)
    try:
        split = manifest["split"]
        stored = {
            "tokenizer": manifest["tokenizer"]["name"],
            "val_fraction": split["val_fraction"],
            "split_seed": split["seed"],
            "text_column": manifest["text_column"],
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is incomplete ({error!r}): prepare the data again") from error
    defaults = {f.name: f.default for f in fields(config)}
    for name, value in stored.items():
        asked = getattr(config, name)
        # gpt2:<folder> asks for the vocabulary gpt2; bpe is short for a size.
        same = asked == value or (name == "tokenizer" and parse_tokenizer(asked).name == value)
        if not same and asked != defaults[name]:
            raise ValueError(f"{name}={asked!r}, but {folder} was prepared with {value!r}: omit it, or prepare again")
    return replace(config, **stored)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a prepared data set (no {MANIFEST}): make one with spheret prepare")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): prepare the data again") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise ValueError(f"{path} is not the manifest of a data set: prepare the data again")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']}, but this release reads formats up to {FORMAT}: update spheret"
        )
    return manifest


def _open_shard(path: Path, entry: dict[str, Any]) -> Shard:
    shard = Shard.open(path)
    # A shard copied from another data set is intact by itself, but does not belong to this manifest.
    if (shard.sha256, shard.n_tokens) != (entry["sha256"], entry["tokens"]):
        raise ValueError(f"{path} is not the shard that {MANIFEST} describes: prepare the data again")
    return shard
