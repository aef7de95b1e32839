"""Run a C function on the threads that PyTorch itself computes with.

PyTorch's parallel regions leave its OpenMP threads spinning for a while. A second pool beside them has to fight for the
cores, which costs more than the loop that it runs; the runtime that PyTorch loaded takes any C function, so its own
threads do the work. Where that runtime cannot be found (macOS, Windows) plain threads serve.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True  # a forked child has the pools but not their threads
    _pools.clear()


_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(address: int, arguments: int, threads: int) -> None:
    """Call ``void (*)(void *)`` at ``address`` with the address ``arguments`` from ``threads`` threads at once."""
    openmp = _openmp()
    if threads > 1 and openmp is not None and not _forked:
        openmp(address, arguments, threads, 0)
    elif threads > 1:
        _run_on_pool(_function(address), arguments, threads)
    else:
        _function(address)(arguments)


@functools.cache
def _function(address: int) -> Callable[[int], None]:
    return _Function(address)


def _run_on_pool(function: Callable[[int], None], arguments: int, threads: int) -> None:
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="spheret")
    others = [_pools[threads].submit(function, arguments) for _ in range(threads - 1)]
    function(arguments)
    for other in others:
        other.result()


@functools.cache
def libtorch() -> Any:
    """PyTorch's CPU library, or None where there is none of that name (macOS, Windows)."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


@functools.cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of the OpenMP runtime that PyTorch is linked to, or None."""
    try:
        # Looked up through PyTorch's library, the name leads to the copy of the runtime that PyTorch uses.
        parallel = libtorch().GOMP_parallel
    except AttributeError:
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel
