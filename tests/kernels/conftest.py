"""Triton kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before Triton is
imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"

if INTERPRETED and importlib.util.find_spec("triton") is not None:
    assert "triton" not in sys.modules, "Triton was imported before its interpreter could be chosen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("spheret.kernels.triton_launch")


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
