"""From a tokenizer's name to the tokenizer, and its storage beside the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from spheret.data.tokenization.base import Tokenizer
from spheret.data.tokenization.bpe import ByteLevelBPE, train_bpe
from spheret.data.tokenization.byte import ByteTokenizer
from spheret.data.tokenization.gpt2 import GPT2_FACTS, load_gpt2
from spheret.data.tokenization.spec import parse_tokenizer

FILE_NAME = "tokenizer.json"


def build_tokenizer(spec: str, train_texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer named ``spec``; ``train_texts`` gives what ``bpe`` learns from. Errors as in ``load_gpt2``."""
    parsed = parse_tokenizer(spec)
    if parsed.kind == "gpt2":
        return load_gpt2(parsed.folder)
    return train_bpe(train_texts(), parsed.vocab_size) if parsed.kind == "bpe" else ByteTokenizer()


def identity(spec: str) -> str:
    """What decides the ids, next to the corpus: known before any training or loading, and free of folder names."""
    parsed = parse_tokenizer(spec)
    return f"{parsed.name} tokenizers-{tokenizers.__version__}" if parsed.kind == "bpe" else parsed.name


def expected_vocab_size(spec: str) -> int:
    """Size of the vocabulary before anything is loaded or trained; a ``bpe`` that runs out of merges ends below it."""
    parsed = parse_tokenizer(spec)
    return {"bytes": ByteTokenizer.vocab_size, "gpt2": GPT2_FACTS[0], "bpe": parsed.vocab_size}[parsed.kind]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer's file, if it needs one, and returns its manifest entry."""
    if isinstance(tokenizer, ByteLevelBPE):
        tokenizer.save(folder / FILE_NAME)
    return {
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "fingerprint": tokenizer.fingerprint,
    }


def load_tokenizer(folder: Path, entry: Mapping[str, Any]) -> Tokenizer:
    """The inverse of ``save_tokenizer``. Raises FileNotFoundError, or ValueError for a damaged or exchanged file."""
    tokenizer: Tokenizer
    if entry["name"] == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = ByteLevelBPE.load(folder / FILE_NAME, entry["name"], entry["eot_id"])
    if tokenizer.fingerprint != entry["fingerprint"] or tokenizer.vocab_size != entry["vocab_size"]:
        raise ValueError(f"{folder / FILE_NAME} is not the tokenizer of this data set: prepare it again")
    return tokenizer
