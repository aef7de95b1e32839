"""Sources of documents: one module per kind of file."""

from __future__ import annotations

from spheret.data.sources.opening import KINDS
from spheret.data.sources.resolve import Census, Source, counted, listed, read_documents, resolve
from spheret.data.sources.text import SEPARATOR

__all__ = ["KINDS", "SEPARATOR", "Census", "Source", "counted", "listed", "read_documents", "resolve"]
