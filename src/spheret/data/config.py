"""The configuration of a data set: what to read, how to tokenise it, what to hold out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from spheret.data.tokenization import parse_tokenizer


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and split of a data set.

    data: what to read, in order: ``stdlib``, files (.txt .md .py .jsonl .json, also compressed, and .parquet), folders;
        or one folder that ``spheret prepare --out`` wrote.
    tokenizer: ``bytes`` | ``bpe`` | ``bpe:<vocabulary>`` | ``gpt2`` | ``gpt2:<folder>``.
    val_fraction: share held out for validation, in (0, 1).
    text_column: the field of ``.jsonl`` and ``.parquet`` rows that holds the text.
    split_seed: decides which documents are held out.
    cache: folder for prepared data; None means ``$SPHERET_CACHE`` or ``~/.cache/spheret``.

    Raises ValueError, naming the value, for an empty list, an unknown tokenizer, or a fraction outside (0, 1).
    """

    data: tuple[str, ...] = ("stdlib",)
    tokenizer: str = "bytes"
    val_fraction: float = 0.1
    text_column: str = "text"
    split_seed: int = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        # People pass a lone string, and JSON gives back a list. tuple("stdlib") would be six corpora of one letter.
        entries = (self.data,) if isinstance(self.data, (str, os.PathLike)) else tuple(self.data)
        object.__setattr__(self, "data", tuple(os.fspath(entry) for entry in entries))
        for name in ("val_fraction", "split_seed"):
            value = getattr(self, name)
            if isinstance(value, np.generic):  # JSON knows no NumPy numbers
                object.__setattr__(self, name, value.item())
        if not self.data or not all(self.data):
            raise ValueError(f"data={self.data!r} names no corpus: give 'stdlib' or the path of a file or folder")
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(f"val_fraction={self.val_fraction!r} must lie between 0 and 1, for example 0.1")
        if not self.text_column:
            raise ValueError("text_column='' names no column: give the field that holds the text, usually 'text'")
        parse_tokenizer(self.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**dataclasses.asdict(self), "data": list(self.data)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataConfig:
        """The inverse of ``to_dict``. Raises ValueError that names unknown keys."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"unknown data settings {unknown}: the settings are {known}")
        return cls(**values)
