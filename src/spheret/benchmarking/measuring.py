"""Measuring variants so that none gains from its place in the order: rounds, clock, and bytes.

A machine that is busy elsewhere slows all variants down together. So trust the ratio to a baseline that was timed in
the same round, not the seconds of either.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

OnSample = Callable[[str, int, float], None]
"""Called after every timed call, with variant, round and seconds."""

_OVERWRITING = ("copy_", "fill_", "zero_")  # they do not read the tensor that they write

# --- time ---


def balanced_order(items: Sequence[T], number: int) -> list[T]:
    """The items in the order of round ``number``: a row of a Williams square.

    A call finds the caches as the call before it left them. In n rounds of n items (2n rounds if n is odd), every item
    follows every other equally often and stands in every place equally often. Shuffling a few dozen rounds does not
    come near that: it moved the medians of equal variants by 7%. Each square numbers the items anew, because within one
    square the call before last is always one of the same two.
    """
    n = len(items)
    block, row = divmod(number, 2 * n if n % 2 else n)
    shuffled = Random(block).sample(items, n)
    zigzag = [(k + 1) // 2 if k % 2 else (n - k // 2) % n for k in range(n)]  # 0, 1, n-1, 2, n-2, ...
    order = [shuffled[(place + row) % n] for place in zigzag]
    return order[::-1] if row >= n else order


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``call`` takes, including the work that it queues on a CUDA device."""
    # Twice: work queued earlier must not count, and the work of this call must be done.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@contextmanager
def collect_between_rounds() -> Iterator[Callable[[], object]]:
    """Switch garbage collection off while calls are timed; yields the function that collects between rounds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield gc.collect
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Make the C library keep the memory that PyTorch frees (glibc; elsewhere this does nothing).

    By default, every large tensor is unmapped when it is freed, and the pages of the next one are faulted in again. On
    a small machine this takes longer than the arithmetic, and the variant that comes next is charged for it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    # No allocation gets a mapping of its own, and the heap is not trimmed at its end.
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def flush_function(device: torch.device) -> Callable[[], Tensor]:
    """A pass over more memory than the caches hold, so that the next call finds none of its data there."""
    memory = torch.zeros(1 << 26, device=device)  # 256 MiB
    return lambda: memory.add_(1.0)


def copy_function(like: Tensor) -> Callable[[], Tensor]:
    """A copy of a tensor of this shape. It reads and writes every byte once, so its speed is the device's bandwidth."""
    source, target = torch.ones_like(like), torch.empty_like(like)
    return lambda: target.copy_(source)


# --- bytes ---


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations read and write. Views and empty tensors move nothing."""

    def __init__(self, but: tuple[str, ...]) -> None:
        super().__init__()
        self.bytes, self.but = 0, but

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        if not function.is_view and "empty" not in name and not name.startswith(self.but):
            read = args[1:] if name.split(".")[0] in _OVERWRITING else args
            tensors = (t for t in tree_leaves((read, kwargs, result)) if isinstance(t, Tensor))
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def moved_bytes(call: Callable[[], object], *, but: tuple[str, ...] = ()) -> int:
    """Bytes that the operations of an eager ``call``, including its backward, read and write.

    Each tensor counts once per operation: this is the memory traffic if nothing stays in a cache. Operations whose
    names begin with one of ``but`` do not count.
    """
    with _Traffic(but) as traffic:
        call()
    return traffic.bytes


def peak_cpu_bytes(call: Callable[[], object]) -> int:
    """The most bytes that ``call`` adds at once to PyTorch's CPU allocator."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below that, every profile prints two lines about itself
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    # PyTorch keeps no peak for CPUs, so add up the allocations and frees in the order of time.
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes), default=0)
