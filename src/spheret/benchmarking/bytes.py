"""Bytes: what the operations of a call read and write, and the most that a step holds at once."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OVERWRITING = ("copy_", "fill_", "zero_")  # they do not read what they write


class _Traffic(TorchDispatchMode):
    """Adds up the tensors that operations take and make; views and empty tensors move nothing."""

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
    """Bytes that the operations of an eager ``call``, its backward included, read and write, each tensor once per
    operation: what its memory traffic comes to where nothing stays in a cache. Operations whose names begin with one
    of ``but`` are left out."""
    with _Traffic(but) as traffic:
        call()
    return traffic.bytes


def peak_cpu_bytes(call: Callable[[], object]) -> int:
    """Most bytes that tensors of PyTorch's CPU allocator held at once during ``call``, beyond those from before it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below, every profile writes two lines about itself to the screen
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes), default=0)


def keep_freed_memory() -> None:
    """Have the C library keep what PyTorch frees (glibc; elsewhere nothing happens).

    By default every large tensor is unmapped when it is freed, and the next one faults in its pages anew: on a small
    machine that takes longer than the arithmetic, and falls on whichever variant comes next.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def copy_function(like: Tensor) -> Callable[[], Tensor]:
    """A copy of a tensor of this shape, the measure of a device's bandwidth: it reads and writes every byte once."""
    source, target = torch.ones_like(like), torch.empty_like(like)
    return lambda: target.copy_(source)


def flush_function(device: torch.device) -> Callable[[], Tensor]:
    """A pass over more memory than any cache holds, after which a call finds nothing of what came before."""
    memory = torch.zeros(1 << 26, device=device)  # 256 MiB
    return lambda: memory.add_(1.0)
