"""Tokenizers by name: parse the name, build the tokenizer, and store it beside the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from spheret.data.tokenization.base import Tokenizer
from spheret.data.tokenization.bpe import ByteLevelBPE, train_bpe
from spheret.data.tokenization.byte import ByteTokenizer
from spheret.data.tokenization.gpt2 import GPT2_FACTS, load_gpt2

FILE_NAME = "tokenizer.json"
BPE_DEFAULT_VOCAB = 4096
BPE_SMALLEST_VOCAB = 258
KNOWN = "'bytes', 'bpe', 'bpe:<vocabulary>', 'gpt2' and 'gpt2:<folder>'"


class TokenizerSpec(NamedTuple):
    """A parsed tokenizer name.

    kind: ``bytes``, ``bpe`` or ``gpt2``; vocab_size: for bpe; folder: for gpt2.
    """

    kind: str
    vocab_size: int = 0
    folder: str | None = None

    @property
    def name(self) -> str:
        """The canonical name, without folders."""
        return f"bpe:{self.vocab_size}" if self.kind == "bpe" else self.kind


def parse_tokenizer(name: str) -> TokenizerSpec:
    """Reads a tokenizer name. Raises ValueError, which lists the known names, for an unknown one."""
    kind, _, argument = name.partition(":")
    if kind == "bytes" and name == kind:
        return TokenizerSpec("bytes")
    if kind == "gpt2" and (argument or name == kind):
        return TokenizerSpec("gpt2", folder=argument or None)
    if kind == "bpe" and (argument or name == kind):
        return TokenizerSpec("bpe", vocab_size=_vocab(name, argument))
    raise ValueError(f"unknown tokenizer {name!r}: the choices are {KNOWN}")


def build_tokenizer(name: str, train_texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer named ``name``; ``bpe`` is trained on ``train_texts()``. Errors as in ``load_gpt2``."""
    parsed = parse_tokenizer(name)
    if parsed.kind == "gpt2":
        return load_gpt2(parsed.folder)
    return train_bpe(train_texts(), parsed.vocab_size) if parsed.kind == "bpe" else ByteTokenizer()


def identity(name: str) -> str:
    """A text that, together with the corpus, determines the token ids. Nothing is trained or loaded to find it."""
    parsed = parse_tokenizer(name)
    # Another release of the library may train other merges on the same text.
    return f"{parsed.name} tokenizers-{tokenizers.__version__}" if parsed.kind == "bpe" else parsed.name


def expected_vocab_size(name: str) -> int:
    """Size of the vocabulary, before anything is loaded or trained. A ``bpe`` that runs out of merges ends smaller."""
    parsed = parse_tokenizer(name)
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
    """The inverse of ``save_tokenizer``. Raises FileNotFoundError, or ValueError for a damaged or foreign file."""
    tokenizer: Tokenizer
    if entry["name"] == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = ByteLevelBPE.load(folder / FILE_NAME, entry["name"], entry["eot_id"])
    if tokenizer.fingerprint != entry["fingerprint"] or tokenizer.vocab_size != entry["vocab_size"]:
        raise ValueError(f"{folder / FILE_NAME} is not the tokenizer of this data set: prepare it again")
    return tokenizer


def _vocab(name: str, argument: str) -> int:
    size = int(argument or BPE_DEFAULT_VOCAB) if argument.isdecimal() or not argument else 0
    if size < BPE_SMALLEST_VOCAB:
        raise ValueError(
            f"tokenizer {name!r}: the vocabulary must be a number of at least {BPE_SMALLEST_VOCAB} "
            f"(256 bytes, a separator and one merge), for example bpe:{BPE_DEFAULT_VOCAB}"
        )
    return size
