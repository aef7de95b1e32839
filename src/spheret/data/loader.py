"""Batches of windows from a shard. Pure functions: a run resumes exactly, and ranks share no state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spheret.data.shards import Shard

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def sample_batch(
    shard: Shard, *, batch_size: int, block_size: int, seed: int, step: int, rank: int = 0, world_size: int = 1
) -> Batch:
    """Random windows for one step: ``x`` and, one token later, ``y``, each (batch_size / world_size, block_size) int64.

    batch_size counts all ranks: the ranks' batches, stacked, are the batch of world_size = 1.
    The windows depend only on (seed, step), on every machine and NumPy release (Philox, a counter-based generator).
    Raises ValueError for a shard shorter than block_size + 1 tokens, and for sizes, ranks or seeds out of range.
    """
    if not 0 <= rank < world_size or batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size={batch_size} must be a positive multiple of world_size={world_size}, and rank={rank} below it"
        )
    if not (0 <= seed < 2**64 and 0 <= step < 2**64):
        raise ValueError(f"seed={seed} and step={step} must lie between 0 and 2^64 - 1")
    starts_available = _window_starts(shard, block_size)
    # Every rank draws the whole batch and takes its share, so the batch does not depend on the number of ranks.
    raw = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(batch_size)
    # Not Generator.integers: NumPy may change its numbers between releases, but not those of random_raw.
    # The upper 53 bits of each number make a float64 in [0, 1) without rounding.
    uniform = (raw >> np.uint64(11)) * 2.0**-53
    starts = (uniform * starts_available).astype(np.int64)
    share = batch_size // world_size
    return _windows(shard, starts[rank * share : (rank + 1) * share], block_size)


def fixed_windows(shard: Shard, *, n_windows: int, block_size: int) -> Batch:
    """Windows for evaluation, evenly spaced: ``x`` and, one token later, ``y``, each (n_windows, block_size) int64.

    They depend only on the shard and reach from its first token to its last. They do not overlap if
    n_windows * block_size < len(shard). A shorter shard gives overlapping windows, but never the same one twice.
    Raises ValueError for a shard shorter than block_size + 1 tokens.
    """
    if n_windows < 1:
        raise ValueError(f"n_windows={n_windows} must be at least 1")
    starts_available = _window_starts(shard, block_size)
    count = min(n_windows, starts_available)
    starts = np.arange(count, dtype=np.int64) * (starts_available - 1) // max(count - 1, 1)
    return _windows(shard, starts, block_size)


def _window_starts(shard: Shard, block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1")
    if len(shard) < block_size + 1:
        raise ValueError(
            f"{shard.path} holds {len(shard)} tokens, but block size {block_size} needs at least {block_size + 1}: "
            f"give a longer text or a block size below {max(len(shard), 2)}"
        )
    return len(shard) - block_size


def _windows(shard: Shard, starts: npt.NDArray[np.int64], block_size: int) -> Batch:
    # int64, because PyTorch's cross entropy takes no other integer targets.
    window = shard.tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return window[:, :-1], window[:, 1:]
