"""Builds and loads the C++ kernel, ``csrc/retract.cpp``, at its first use.

The library is cached in ``$SPHERET_CACHE`` (default ``~/.cache/spheret``), one per PyTorch version, instruction set,
compiler flags and source. If that folder cannot be used, the library is built for this process only. If it cannot be
built, the formulas in PyTorch operations run instead, and ``spheret.which_backend`` gives the reason.

``python -m spheret.kernels.cpp`` builds it into the package in advance, for a wheel or an image without a compiler.
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
# These macros select PyTorch's vector types; the keys are PyTorch's names for the instruction set of a processor.
_INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"],
}
_FLAGS = ["-std=c++20", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]

_lock = threading.Lock()
_library: Any = None
_obstacle: str | None = None  # None: loading not tried yet
_fork_lost_threads = False


def obstacle() -> str:
    """Why the kernel cannot run, or the empty string. The first call loads the library, and builds it if needed."""
    global _obstacle
    if _obstacle is None:
        with _lock:
            if _obstacle is None:
                _obstacle = _load()
    return _obstacle


# `torch.compile` calls this function while tracing, instead of tracing it; see retract.in_function_transform.
obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def description() -> str:
    """How the loaded kernel runs, for ``which_backend``."""
    return f"{instruction_set()} instructions, {'one thread after a fork' if _fork_lost_threads else 'all threads'}"


def instruction_set() -> str:
    """PyTorch's name for the vector instructions of this processor, or ``DEFAULT`` for the baseline set."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in _INSTRUCTIONS else "DEFAULT"


def library_name(instructions: str) -> str:
    """File name of the library. It names all that the library depends on, so that only a matching one is loaded."""
    text = SOURCE.read_bytes() + " ".join([*_FLAGS, *_INSTRUCTIONS.get(instructions, ())]).encode()
    digest = hashlib.sha256(text).hexdigest()[:12]
    return f"retract-{digest}-torch{torch.__version__}-{platform.machine()}-{instructions.lower()}.so"


def build(folder: Path, instructions: str) -> Path:
    """Compile the kernel into ``folder``, atomically, with a note on standard error; returns the library's path.

    Raises:
        RuntimeError: there is no compiler, or it failed (with its error message).
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
            # Clang links its own OpenMP runtime, whose threads would compete with PyTorch's, so it gets no OpenMP.
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
        with new.open("ab") as file:  # loading ignores bytes after the library; _is_whole checks them
            file.write(hashlib.sha256(new.read_bytes()).digest())
        os.replace(new, target)
    print(f"spheret: compiled in {time.perf_counter() - started:.0f} s: {target}", file=sys.stderr, flush=True)
    return target


def _load() -> str:
    """Load the matching library: built in advance, cached, or new. Returns why this failed, or the empty string."""
    instructions = instruction_set()
    name = library_name(instructions)
    try:
        if _is_whole(SOURCE.with_name(name)):
            _open(SOURCE.with_name(name))
            return ""
        try:
            folder = Path(os.environ.get("SPHERET_CACHE") or "~/.cache/spheret").expanduser() / "kernels"
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{name}.lock")  # one of several processes builds, the others wait
            lock.acquire()
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
            warnings.warn(f"no cache for the C++ kernel, it is built for this process only: {error}", stacklevel=2)
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
    # Loading a truncated library can crash the process.
    content = path.read_bytes() if path.exists() else b""
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _open(path: Path) -> None:
    global _library
    torch.ops.load_library(str(path))
    _library = ctypes.CDLL(str(path))
    if _fork_lost_threads:
        _library.spheret_use_one_thread()


# --- forks: a child process lacks the threads of PyTorch's pool, and would wait for them forever ---


def _count_threads() -> int:
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.is_dir() else -1  # -1: not Linux


_threads_at_import = _count_threads()  # NumPy starts some, which are harmless
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
