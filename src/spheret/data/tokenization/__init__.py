"""Tokenizers: bytes, a BPE trained on the corpus, and GPT-2's."""

from __future__ import annotations

from spheret.data.tokenization.base import Tokenizer, encode_documents
from spheret.data.tokenization.bpe import ByteLevelBPE, train_bpe
from spheret.data.tokenization.build import (
    TokenizerSpec,
    build_tokenizer,
    expected_vocab_size,
    identity,
    load_tokenizer,
    parse_tokenizer,
    save_tokenizer,
)
from spheret.data.tokenization.byte import ByteTokenizer
from spheret.data.tokenization.gpt2 import load_gpt2

__all__ = [
    "ByteLevelBPE",
    "ByteTokenizer",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "encode_documents",
    "expected_vocab_size",
    "identity",
    "load_gpt2",
    "load_tokenizer",
    "parse_tokenizer",
    "save_tokenizer",
    "train_bpe",
]
