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

_DIGEST_BYTES = 32  # SHA-256 of the library, at the end of its file

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
    threads = "one thread after a fork" if _fork_lost_threads else "PyTorch's threads"
    return f"{instruction_set()} instructions, {threads}"


def instruction_set() -> str:
    """PyTorch's name for the vector instructions of this processor, ``DEFAULT`` for those that every one has."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in _INSTRUCTIONS else "DEFAULT"


def cache_folder() -> Path:
    """Where built libraries are kept.

    RuntimeError: the home folder is unknown.
    """
    return Path(os.environ.get("SPHERET_CACHE") or "~/.cache/spheret").expanduser() / "kernels"


def library_name(instructions: str) -> str:
    """File name of the library: what it depends on, so that none is loaded where it does not fit."""
    text = SOURCE.read_bytes() + " ".join([*_FLAGS, *_INSTRUCTIONS.get(instructions, ())]).encode()
    digest = hashlib.sha256(text).hexdigest()[:12]
    return f"retract-{digest}-torch{torch.__version__}-{platform.machine()}-{instructions.lower()}.so"


def build(folder: Path, instructions: str) -> Path:
    """Compile the kernel into ``folder``, atomically; returns the library's path.

    Raises:
        RuntimeError: no compiler that starts, or its error message.
        OSError: the folder cannot be written.
    """
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or name one in $CXX")
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
        new, target = Path(work) / "retract.so", folder / library_name(instructions)
        command = [
            *compiler.split(),
            *_FLAGS,
            *_INSTRUCTIONS.get(instructions, ("-DCPU_CAPABILITY_DEFAULT",)),
            f"-DCPU_CAPABILITY={instructions}",
            # Clang has its own OpenMP runtime, whose threads would fight PyTorch's: one thread there.
            *([] if "clang" in compiler else ["-fopenmp"]),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{folder}" for folder in (include, include / "torch" / "csrc" / "api" / "include")),
            str(SOURCE),
            *("-o", str(new), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"the C++ compiler does not start: {error}") from error
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            first = (errors or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
            raise RuntimeError(f"{compiler} could not compile the kernel: {first}")
        with new.open("ab") as file:  # what follows the library's own content is ignored when it is loaded
            file.write(hashlib.sha256(new.read_bytes()).digest())
        os.replace(new, target)
    return target


def _load() -> str:
    instructions = instruction_set()
    name = library_name(instructions)
    try:
        prebuilt = SOURCE.with_name(name)
        if prebuilt.exists():
            _open(prebuilt)
        else:
            _open_from_cache(name, instructions)
    except (RuntimeError, OSError) as error:
        return f"no C++ kernel: {error}"
    return ""


def _open_from_cache(name: str, instructions: str) -> None:
    try:
        folder = _usable_cache_folder()
        with FileLock(folder / f"{name}.lock"):  # of processes that start at once, one builds
            path = folder / name
            if _is_whole(path):
                try:
                    _open(path)
                    return
                except OSError:  # built on another system that shares the folder
                    pass
            _say_and_build(folder, instructions)
            _open(path)
    except OSError as error:
        warnings.warn(f"the C++ kernel is built for this process alone: {error}", stacklevel=2)
        with tempfile.TemporaryDirectory(prefix="spheret-") as temporary:
            _open(_say_and_build(Path(temporary), instructions))


def _is_whole(path: Path) -> bool:
    # To load a library that is cut short can end the process.
    if not path.exists():
        return False
    content = path.read_bytes()
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def _usable_cache_folder() -> Path:
    try:
        folder = cache_folder()
    except RuntimeError as error:  # no home
        raise OSError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say_and_build(folder: Path, instructions: str) -> Path:
    started = time.perf_counter()
    print("spheret: compiling the CPU kernel (once per PyTorch version and processor) ...", file=sys.stderr, flush=True)
    path = build(folder, instructions)
    print(f"spheret: compiled in {time.perf_counter() - started:.0f} s: {path}", file=sys.stderr, flush=True)
    return path


def _open(path: Path) -> None:
    global _library
    torch.ops.load_library(str(path))
    _library = ctypes.CDLL(str(path))
    if _fork_lost_threads:
        _library.spheret_use_one_thread()


# --- forks: the child of a process that has used PyTorch's threads has none of them, and would wait for ever ---


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return -1


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
