"""`spheret prepare`: corpus -> tokenised shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from spheret import data


@dataclass(frozen=True)
class PrepareCommand:
    """Turn a corpus into tokenised shards.

    Example: spheret prepare --data corpus.parquet more/ --tokenizer bpe:8192 --out shards
    """

    data: tuple[str, ...] = ("stdlib",)
    """stdlib, or .txt, .jsonl, .parquet files or folders of them."""
    tokenizer: str = "bytes"
    """bytes, bpe, bpe:<vocabulary>, gpt2 or gpt2:<folder>."""
    text_column: str = "text"
    """Field of .jsonl and .parquet files that holds the text."""
    val_fraction: float = 0.1
    """Share of the documents held out for validation."""
    out: Path | None = None
    """Folder to write to; without it, the cache."""


def run(command: PrepareCommand) -> int:
    """Prepare, and print what came of it."""
    console = Console(soft_wrap=True, highlight=False)
    config = data.DataConfig(
        data=command.data,
        tokenizer=command.tokenizer,
        val_fraction=command.val_fraction,
        text_column=command.text_column,
    )
    dataset = data.prepare(
        config, out=command.out, progress=lambda line: console.print(line, style="dim", markup=False)
    )
    for key, value in dataset.summary().items():
        console.print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}", markup=False)
    console.print(f"folder: {dataset.path}", markup=False)
    return 0
