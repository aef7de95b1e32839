"""Builds and loads the C++ kernel, ``csrc/retract.cpp``, at its first use.

The library is kept in ``$SPHERET_CACHE`` (default ``~/.cache/spheret``), one for each PyTorch version, instruction set,
compiler flags and source. Where that folder cannot be used the library is built for this process alone; where it
cannot be built at all, the formulas in PyTorch operations serve, and ``spheret.which_backend`` says why.

``python -m spheret.kernels.cpp`` builds it ahead into the package, for a wheel or an image without a compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

SOURCE = Path(__file__).parent / "csrc" / "retract.cpp"
# The vector types of PyTorch are chosen by these macros; its own name for a processor says which it can run.
_INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"],
}
_FLAGS = ["-std=c++20", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]

_lock = threading.Lock()
_library: Any = None
_obstacle: str | None = None  # None: not tried yet
_fork_lost_threads = False


def obstacle() -> str:
    """Why the kernel cannot serve, or the empty string: it is loaded, and built before that if need be."""
    global _obstacle
    if _obstacle is None:
        with _lock:
            if _obstacle is None:
                _obstacle = _load()
    return _obstacle


# `torch.compile` calls this while it traces, instead of tracing it; see retract.in_function_transform.
obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def description() -> str:
    """How the loaded kernel runs, for ``which_backend``."""
    return f"{instruction_set()} instructions, {'one thread after a fork' if _fork_lost_threads else 'all threads'}"


def instruction_set() -> str:
    """PyTorch's name for the vector instructions of this processor, ``DEFAULT`` for those that every one has."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in _INSTRUCTIONS else "DEFAULT"


def library_name(instructions: str) -> str:
    """File name of the library: what it depends on, so that none is loaded where it does not fit."""
    text = SOURCE.read_bytes() + " ".join([*_FLAGS, *_INSTRUCTIONS.get(instructions, ())]).encode()
    digest = hashlib.sha256(text).hexdigest()[:12]
    return f"retract-{digest}-torch{torch.__version__}-{platform.machine()}-{instructions.lower()}.so"


def build(folder: Path, instructions: str) -> Path:
    """Compile the kernel into ``folder``, atomically, and say so on standard error; returns the library's path.

    Raises:
        RuntimeError: no compiler, or its error message.
        OSError: the folder cannot be written.
    """
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or name one in $CXX")
    torch_folder, started = Path(torch.__file__).parent, time.perf_counter()
    print("spheret: compiling the CPU kernel (once per PyTorch version and processor) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
        new, target = Path(work) / "retract.so", folder / library_name(instructions)
        command = [
            *(*compiler.split(), *_FLAGS, f"-DCPU_CAPABILITY={instructions}"),
            *_INSTRUCTIONS.get(instructions, ["-DCPU_CAPABILITY_DEFAULT"]),
            # Clang has its own OpenMP runtime, whose threads would fight PyTorch's: one thread there.
            *([] if "clang" in compiler else ["-fopenmp"]),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{torch_folder / path}" for path in ("include", "include/torch/csrc/api/include")),
            *(str(SOURCE), "-o", str(new), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"the C++ compiler does not start: {error}") from error
        if done.returncode:
            lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise RuntimeError(f"{compiler} could not compile the kernel: {first}")
        with new.open("ab") as file:  # a digest after the library's own content, which loading it ignores
            file.write(hashlib.sha256(new.read_bytes()).digest())
        os.replace(new, target)
    print(f"spheret: compiled in {time.perf_counter() - started:.0f} s: {target}", file=sys.stderr, flush=True)
    return target


def _load() -> str:
    """Load the library that belongs here, built ahead, cached or new; returns why that cannot be."""
    instructions = instruction_set()
    name = library_name(instructions)
    try:
        if _is_whole(SOURCE.with_name(name)):
            _open(SOURCE.with_name(name))
            return ""
        try:
            folder = Path(os.environ.get("SPHERET_CACHE") or "~/.cache/spheret").expanduser() / "kernels"
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{name}.lock")  # of processes that start at once, one builds
            lock.acquire()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            warnings.warn(f"no cache for the C++ kernel, it is built for this process alone: {error}", stacklevel=2)
            with tempfile.TemporaryDirectory(prefix="spheret-") as temporary:
                _open(build(Path(temporary), instructions))
            return ""
        try:
            _open(folder / name if _is_whole(folder / name) else build(folder, instructions))
        finally:
            lock.release()
    except (OSError, RuntimeError) as error:
        return f"no C++ kernel: {error}"
    return ""


def _is_whole(path: Path) -> bool:
    # To load a library that is cut short can end the process.
    content = path.read_bytes() if path.exists() else b""
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _open(path: Path) -> None:
    global _library
    torch.ops.load_library(str(path))
    _library = ctypes.CDLL(str(path))
    if _fork_lost_threads:
        _library.spheret_use_one_thread()


# --- forks: the child of a process that has used PyTorch's threads has none of them, and would wait for ever ---


def _count_threads() -> int:
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.is_dir() else -1  # -1: not Linux


_threads_at_import = _count_threads()  # NumPy starts some, which are no trouble
_threads_before_fork = -1


def _before_fork() -> None:
    global _threads_before_fork
    _threads_before_fork = _count_threads()


def _after_fork() -> None:
    global _fork_lost_threads, _lock
    _lock = threading.Lock()
    _fork_lost_threads |= not 0 < _threads_before_fork <= _threads_at_import
    if _fork_lost_threads and _library is not None:
        _library.spheret_use_one_thread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


if __name__ == "__main__":
    for _instructions in sys.argv[1:] or [instruction_set()]:
        print(build(SOURCE.parent, _instructions))
