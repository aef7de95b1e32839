"""Triton kernels run on the GPU where there is one, else in Triton's interpreter (chosen in the conftest above)."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from spheret.kernels import cpp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``spheret.kernels.triton_launch``, ready to run on `device`."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.import_module("spheret.kernels.triton_launch")


@pytest.fixture(scope="session")
def compiled_kernel() -> None:
    """The C++ kernel, loaded; skips where it cannot be built."""
    if cpp.obstacle():
        pytest.skip(cpp.obstacle())


@pytest.fixture(scope="session")
def in_new_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a new Python that finds what this one finds; keywords go into its environment, None removes one."""

    def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "PYTHONPATH": path, **environment}
        env = {name: value for name, value in env.items() if value is not None}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)

    return run
