"""Fixtures that every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real corpora, tokenizer files and evaluation sets, laid beside the checkout; skips where it is
    absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no reference data at {SHARED_DATA}")
    return SHARED_DATA
