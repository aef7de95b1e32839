"""Fixtures that every test folder shares."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

# Without a GPU Triton's kernels run in its interpreter, which must be chosen before any test's library imports Triton;
# afterwards the choice is taken back, for compilers that run in the same process.
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("spheret.kernels.triton_launch")

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
def shared_data() -> Path:
    """Folder with real corpora, tokenizer files and evaluation sets, laid beside the checkout; skips where it is
    absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no reference data at {SHARED_DATA}")
    return SHARED_DATA
