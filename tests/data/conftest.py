"""Fixtures of the tests of corpora."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 rows, two of them the same."""
    path = tmp_path / "rows.jsonl"
    texts = [f"document number {i}, with the square {i * i}" for i in range(39)] + [
        "document number 3, with the square 9"
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
