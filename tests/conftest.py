"""Fixtures that every test folder shares."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spheret.kernels import cpp

# Without a GPU Triton's kernels run in its interpreter, which must be chosen before any test's library imports Triton;
# afterwards the choice is taken back, for compilers that run in the same process.
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("spheret.kernels.triton_launch")

# Read here, before a test sets the variable.
USERS_CACHE = Path(os.environ.get("SPHERET_CACHE") or "~/.cache/spheret").expanduser()
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers whichever tests ran before, and wherever."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cxx_compiler() -> None:
    """Skips where there is no C++ compiler, without which torch.compile cannot serve a CPU."""
    if not (os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++", "c++")))):
        pytest.skip("no C++ compiler on the path")


@pytest.fixture(scope="session")
def kernel_library() -> Path | None:
    """The C++ kernel as this process has built or found it; None where there is none to be copied.

    To compile it takes longer than any test here: all that need it share one.
    """
    if cpp.obstacle():
        return None
    name = cpp.library_name(cpp.instruction_set())
    return next((p for p in (cpp.SOURCE.with_name(name), USERS_CACHE / "kernels" / name) if p.exists()), None)


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory: pytest.TempPathFactory, kernel_library: Path | None) -> Callable[[], Path]:
    """Makes caches that hold the C++ kernel and nothing else."""

    def make() -> Path:
        cache = tmp_path_factory.mktemp("cache")
        if kernel_library is not None:
            (cache / "kernels").mkdir()
            shutil.copy(kernel_library, cache / "kernels")
        return cache

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real corpora, tokenizer files and evaluation sets, laid beside the checkout; skips where it is
    absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no reference data at {SHARED_DATA}")
    return SHARED_DATA
