"""Parquet files: one row, one document. Needs pyarrow (the ``data`` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROWS_AT_ONCE = 256  # bounds the memory: a row may be a whole book


def read_parquet(path: Path, column: str) -> Iterator[str]:
    """The text in ``column`` of every row, in order, "" for null.

    Raises ValueError for a missing column (listing the present ones), one that occurs twice or is not text, and a
    broken file; ImportError without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f'reading {path} needs pyarrow: pip install "spheret[data]"') from error
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise ValueError(
                    f"{path}: no column {column!r}; the columns are {schema.names}: set text_column to one of them"
                )
            if (times := schema.names.count(column)) > 1:
                raise ValueError(f"{path} has {times} columns named {column!r}: rename all but one, or write it again")
            kind = schema.field(column).type
            if not _is_text(pa, kind):
                raise ValueError(
                    f"{path}: column {column!r} holds {kind}, not text: set text_column to another of {schema.names}"
                )
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
                for text in batch.column(0).to_pylist():
                    yield text or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # OSError: a page that cannot be decompressed
        raise ValueError(f"{path} is not a readable Parquet file ({error}): fetch or write it again") from error


def _is_text(pa: object, kind: object) -> bool:
    types = pa.types  # type: ignore[attr-defined]
    if types.is_dictionary(kind):  # repeated values stored once: the type of the values decides
        kind = kind.value_type  # type: ignore[attr-defined]
    # A column of nulls alone may have no other type.
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    )
