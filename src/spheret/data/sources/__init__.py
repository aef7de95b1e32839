"""Sources of documents: one module per kind of file."""

from __future__ import annotations

from spheret.data.sources.resolve import KINDS, Source, read_documents, resolve

__all__ = ["KINDS", "Source", "read_documents", "resolve"]
