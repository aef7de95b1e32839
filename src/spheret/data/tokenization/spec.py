"""The tokenizer names that configurations use."""

from __future__ import annotations

from typing import NamedTuple

BPE_DEFAULT_VOCAB = 4096
BPE_SMALLEST_VOCAB = 258
KNOWN = "'bytes', 'bpe', 'bpe:<vocabulary>', 'gpt2' and 'gpt2:<folder>'"


class TokenizerSpec(NamedTuple):
    """kind: ``bytes``, ``bpe`` or ``gpt2``; vocab_size: that of bpe; folder: that of gpt2."""

    kind: str
    vocab_size: int = 0
    folder: str | None = None

    @property
    def name(self) -> str:
        """The canonical name, without folders."""
        return f"bpe:{self.vocab_size}" if self.kind == "bpe" else self.kind


def parse_tokenizer(text: str) -> TokenizerSpec:
    """Reads a tokenizer name. Raises ValueError, naming it and the choices, for any other."""
    kind, _, argument = text.partition(":")
    if kind == "bytes" and text == kind:
        return TokenizerSpec("bytes")
    if kind == "gpt2" and (argument or text == kind):
        return TokenizerSpec("gpt2", folder=argument or None)
    if kind == "bpe" and (argument or text == kind):
        return TokenizerSpec("bpe", vocab_size=_vocab(text, argument))
    raise ValueError(f"unknown tokenizer {text!r}: the choices are {KNOWN}")


def _vocab(text: str, argument: str) -> int:
    size = int(argument or BPE_DEFAULT_VOCAB) if argument.isdecimal() or not argument else 0
    if size < BPE_SMALLEST_VOCAB:
        raise ValueError(
            f"tokenizer {text!r}: the vocabulary must be a number of at least {BPE_SMALLEST_VOCAB} "
            f"(256 bytes, a separator and one merge), for example bpe:{BPE_DEFAULT_VOCAB}"
        )
    return size
