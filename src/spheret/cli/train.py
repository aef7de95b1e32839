"""`spheret prepare`: turn a corpus into tokenised shards. `spheret train`: one run on a corpus."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spheret.cli.console import UsageError, duration, flags_checked, output, say
from spheret.cli.schemes import say_cautions
from spheret.connections import canonical_name
from spheret.data import DataConfig, prepare
from spheret.training import RunResult, TrainConfig, TrainingInterrupted, checkpoints, train
from spheret.training.checkpoint import weights_folder
from spheret.training.run_folder import CONFIG, RUN, read_config
from spheret.training.settings import RunSettings, scheme_lr
from spheret.training.state import check_buildable

# --- prepare ---


@dataclass(frozen=True)
class PrepareCommand:
    """Turn a corpus into tokenised shards.

    Example: spheret prepare --data corpus.parquet more/ --tokenizer bpe:8192 --out shards
    """

    data: tuple[str, ...] = DataConfig.data
    """Corpus: stdlib (Python's own source), .txt, .jsonl, .json or .parquet files, or folders of them."""
    tokenizer: str = DataConfig.tokenizer
    """bytes, bpe, bpe:<vocabulary>, gpt2 or gpt2:<folder>."""
    text_column: str = DataConfig.text_column
    """Field of .jsonl and .parquet files that holds the text."""
    val_fraction: float = DataConfig.val_fraction
    """Share of the documents held out for validation."""
    out: Path | None = None
    """Folder to write to. If not given: the cache."""

    def __post_init__(self) -> None:
        with flags_checked():
            self.config()

    def config(self) -> DataConfig:
        """What to read and how to split it."""
        return DataConfig(
            data=self.data, tokenizer=self.tokenizer, val_fraction=self.val_fraction, text_column=self.text_column
        )


def run_prepare(command: PrepareCommand) -> int:
    """Prepare the corpus and print its summary; returns the exit code."""
    console = output()
    dataset = prepare(command.config(), out=command.out, progress=lambda line: say(console, line, "dim"))
    for key, value in dataset.summary().items():
        say(console, f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    say(console, f"folder: {dataset.path}", to_copy=True)
    return 0


# --- train ---


@dataclass(frozen=True, kw_only=True)
class TrainCommand(RunSettings):
    """Train one model into a run folder: config.json, metrics.jsonl, checkpoints, diagnostics.json and run.json.

    Example: spheret train --scheme spheret --data my_texts/ --tokenizer bpe --steps 2000 --out runs/proj

    `spheret train --resume --out runs/proj` continues a run that Ctrl-C or a signal stopped, and with more --steps also
    one that has ended, if its schedule is constant, or wsd before the decay. `spheret train NAME` is short for
    `spheret train --recipe NAME`.
    """

    recipe: str = ""
    """Take the settings of this recipe (see `spheret plan`) for every flag that is not given."""
    scheme: str = "spheret"
    """Residual scheme (see `spheret schemes`)."""
    lr: float | None = None
    """Peak learning rate. If not given: 0.8/d for the width d, times the scheme's own factor."""
    seed: int = TrainConfig.seed
    """Sets the initial weights and the order of the batches."""
    out: Path = Path("runs/train")
    """Run folder."""
    resume: bool = False
    """Continue the run in --out from its newest whole checkpoint, with its settings. Flags must agree with them, apart
    from intervals, device and the like."""
    init_from: Path | None = None
    """Start a new run from the weights in this run folder or checkpoint: a new optimizer, and step 0."""

    def __post_init__(self) -> None:
        with flags_checked():
            self.config(vocab_size=1)

    def config(self, vocab_size: int) -> TrainConfig:
        """The run's configuration, for a vocabulary of this size."""
        resumed = self.resume and (self.out / CONFIG).exists()
        config = self.train_config(
            canonical_name(self.scheme),
            lr=scheme_lr(self.scheme, n_embd=self.n_embd, n_layer=self.n_layer) if self.lr is None else self.lr,
            seed=self.seed,
            vocab_size=vocab_size,
            base=read_config(self.out) if resumed else None,
        )
        # Absolute, because the run may be resumed from another current folder.
        config = replace(config, data=replace(config.data, data=tuple(map(_absolute, config.data.data))))
        return config if self.init_from is None else replace(config, init_from=str(self.init_from.resolve()))


def _absolute(corpus: str) -> str:
    """`corpus`, a path as an absolute one; a name such as stdlib stays as it is."""
    return os.path.abspath(corpus) if corpus != DataConfig.data[0] and os.path.exists(corpus) else corpus


def run(command: TrainCommand) -> int:
    """Train, with one line of progress per log record; returns the exit code."""
    console = output()
    # Both checks come before the corpus is prepared, which may take long.
    _check_folder(command)
    config = command.config(vocab_size=1)
    check_buildable(config)
    say_cautions(console, [command.scheme])
    dataset = prepare(config.data, progress=lambda line: say(console, line, "dim"))
    config = command.config(dataset.tokenizer.vocab_size)
    line = progress_line(config)
    try:
        result = train(
            config,
            command.out,
            dataset=dataset,
            resume=command.resume,
            on_log=lambda record: say(console, line(record)),
            on_resume=lambda saved: say(console, f"continuing from {saved.name} of {config.total_steps}"),
        )
    except TrainingInterrupted as stop:
        start = "" if checkpoints(command.out) else " (it will start over, because there is no checkpoint)"
        with suppress(OSError):  # it may be the output that ended
            say(console, f"Stopped. {command.out} holds the run so far. To continue{start}:")
            say(console, f"  spheret train --resume --out {shlex.quote(str(command.out))}", to_copy=True)
        return stop.exit_code
    say(console, summary(result))
    return 0 if result.outcome == "finished" else 1


def summary(result: RunResult) -> str:
    """The outcome of the run, in two or three lines."""
    loss = "none" if result.val_loss is None else f"{result.val_loss:.4f} ± {result.val_se or 0:.4f} nats/token"
    collapsed = ", collapsed to the unigram plateau" if result.collapsed else ""
    at = f" of step {result.val_step}" if result.val_step not in (None, result.step) else ""
    text = f"{result.outcome} at step {result.step}: validation loss{at} {loss}{collapsed}"
    return "\n".join(
        [
            text,
            *([result.explanation] if result.explanation else []),
            f"{result.parameters:,} parameters, run folder {result.folder}",
        ]
    )


def progress_line(config: TrainConfig) -> Callable[[dict[str, Any]], str]:
    """Returns a function that formats a log record as one line.

    The line shows step, losses, learning rate, gradient norm, speed and time left.
    """
    # Time and step of the first record, from which the time left is estimated: a resumed run does not begin at step 0.
    started: tuple[float, int] | None = None

    def line(record: dict[str, Any]) -> str:
        nonlocal started
        step, steps, now = record["step"], config.total_steps, time.monotonic()
        if started is None:
            started = (now, step)
        done = step - started[1]
        left = duration((now - started[0]) / done * (steps - step) if done else None)
        return _line(record, steps) + f"  left {left}"

    return line


def _check_folder(command: TrainCommand) -> None:
    """UsageError: the folder already holds a run, or holds none to resume. FileNotFoundError: no weights there."""
    out = command.out
    if command.init_from is not None and not (command.resume and checkpoints(out)):
        weights_folder(command.init_from)
    if command.resume and not (out / CONFIG).exists():
        raise UsageError(f"--resume: there is no run in {out}, since it has no {CONFIG}; omit --resume to start one")
    if not command.resume and ((out / RUN).exists() or checkpoints(out)):
        raise UsageError(
            f"{out} already holds a run: continue it with `spheret train --resume --out {out}`, or choose another --out"
        )


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
