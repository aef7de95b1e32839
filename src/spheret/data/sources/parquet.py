"""Parquet files: one row, one document. Needs pyarrow (the ``data`` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROWS_AT_ONCE = 256  # bounds the memory: a row may be a whole book


def read_parquet(path: Path, column: str) -> Iterator[str]:
    """The texts in ``column``, in order; nulls and empty texts are skipped.

    Raises ValueError for a missing column (listing the present ones), a column that is not text, a broken file and a
    file without text; ImportError without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f'reading {path} needs pyarrow: pip install "spheret[data]"') from error
    empty = True
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise ValueError(
                    f"{path}: no column {column!r}; the columns are {schema.names}: set text_column to one of them"
                )
            kind = schema.field(column).type
            if not _is_text(pa, kind):
                raise ValueError(
                    f"{path}: column {column!r} holds {kind}, not text: set text_column to another of {schema.names}"
                )
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
                for text in filter(None, batch.column(0).to_pylist()):
                    empty = False
                    yield text
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error}): fetch or write it again") from error
    if empty:
        raise ValueError(f"{path} holds no text in column {column!r}: give a file with text in it, or omit it")


def _is_text(pa: object, kind: object) -> bool:
    types = pa.types  # type: ignore[attr-defined]
    if types.is_dictionary(kind):  # repeated values stored once: the type of the values decides
        kind = kind.value_type  # type: ignore[attr-defined]
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
