"""`spheret prepare`: corpus -> tokenised shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spheret.cli.console import output, say
from spheret.cli.errors import flags_checked
from spheret.data import DataConfig
from spheret.data import prepare as prepare_data


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

    def __post_init__(self) -> None:
        with flags_checked():
            self.config()

    def config(self) -> DataConfig:
        """What to read and how to cut it."""
        return DataConfig(
            data=self.data, tokenizer=self.tokenizer, val_fraction=self.val_fraction, text_column=self.text_column
        )


def run(command: PrepareCommand) -> int:
    """Prepare, and print what came of it."""
    console = output()
    dataset = prepare_data(command.config(), out=command.out, progress=lambda line: say(console, line, "dim"))
    for key, value in dataset.summary().items():
        say(console, f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    say(console, f"folder: {dataset.path}", to_copy=True)
    return 0
