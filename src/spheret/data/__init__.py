"""Corpora, tokenizers, token shards and batches. No module in this room depends on a model.

dataset = prepare(DataConfig(data=("stdlib",), tokenizer="bytes"))
x, y = sample_batch(dataset.train, batch_size=16, block_size=128, seed=0, step=0)
"""

from __future__ import annotations

from spheret.data.cache import cache_folder
from spheret.data.config import DataConfig
from spheret.data.dataset import Dataset, settled
from spheret.data.loader import fixed_windows, sample_batch
from spheret.data.preparation import prepare
from spheret.data.shards import Shard, ShardWriter, write_shard
from spheret.data.statistics import bytes_in_targets, unigram_loss
from spheret.data.tokenization import ByteTokenizer, Tokenizer, expected_vocab_size, load_gpt2

__all__ = [
    "ByteTokenizer",
    "DataConfig",
    "Dataset",
    "Shard",
    "ShardWriter",
    "Tokenizer",
    "bytes_in_targets",
    "cache_folder",
    "expected_vocab_size",
    "fixed_windows",
    "load_gpt2",
    "prepare",
    "sample_batch",
    "settled",
    "unigram_loss",
    "write_shard",
]
