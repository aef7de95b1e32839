"""Triton kernels run on the GPU where there is one, else in Triton's interpreter (chosen in the conftest above)."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

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
