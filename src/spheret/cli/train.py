"""`spheret train`: one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spheret.connections import canonical_name
from spheret.data import prepare
from spheret.experiments.settings import RunSettings
from spheret.training import TrainingInterrupted, train


@dataclass(frozen=True, kw_only=True)
class TrainCommand(RunSettings):
    """Train one model.

    Example: spheret train --scheme spheret:p=1 --data my_texts/ --tokenizer bpe --steps 2000 --out runs/first
    """

    scheme: str = "spheret:p=1"
    """Residual scheme (see `spheret schemes`)."""
    lr: float = 4e-3
    """Peak learning rate."""
    seed: int = 1
    """Decides the initial weights and the order of the batches."""
    out: Path = Path("runs/train")
    """Run folder."""
    resume: bool = False
    """Go on from the newest checkpoint in --out."""


def run(command: TrainCommand) -> int:
    """Train with one line of progress per log record; returns the exit code."""
    console = Console(soft_wrap=True, highlight=False)
    dataset = prepare(command.data_config, progress=lambda line: console.print(line, style="dim", markup=False))
    config = command.train_config(
        canonical_name(command.scheme), lr=command.lr, seed=command.seed, vocab_size=dataset.tokenizer.vocab_size
    )
    try:
        result = train(
            config,
            command.out,
            dataset=dataset,
            resume=command.resume,
            on_log=lambda r: console.print(_line(r, config.total_steps)),
        )
    except TrainingInterrupted as stop:
        console.print(f"Stopped. {command.out} holds the run so far; go on with the same command and --resume.")
        return stop.exit_code
    loss = "none" if result.val_loss is None else f"{result.val_loss:.4f} ± {result.val_se:.4f}"
    console.print(
        f"{result.outcome}: validation loss {loss} nats/token, {result.parameters:,} parameters, run folder {command.out}"
    )
    if result.reason:
        console.print(result.reason)
    return 0 if result.outcome == "finished" else 1


def _line(record: dict[str, Any], steps: int) -> str:
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}"]
    for key, form in (
        ("loss", ".4f"),
        ("val_loss", ".4f"),
        ("lr", ".2e"),
        ("grad_norm", ".3f"),
        ("tokens_per_s", ",.0f"),
    ):
        if record.get(key) is not None:
            parts.append(f"{key.replace('_per_s', '/s')} {record[key]:{form}}")
    return "  ".join(parts)
