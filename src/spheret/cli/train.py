"""`spheret train`: one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from spheret.cli.console import output, say
from spheret.cli.errors import UsageError, flags_checked
from spheret.cli.progress import duration
from spheret.connections import canonical_name
from spheret.data import prepare
from spheret.recipes import recipe
from spheret.training import RunResult, TrainConfig, TrainingInterrupted, checkpoints, train
from spheret.training.files import CONFIG, RUN
from spheret.training.settings import RunSettings, scheme_lr
from spheret.training.validation import check_buildable


@dataclass(frozen=True, kw_only=True)
class TrainCommand(RunSettings):
    """Train one model into a run folder: config.json, metrics.jsonl, checkpoints, diagnostics.json and run.json.

    Example: spheret train --scheme spheret:p=1 --data my_texts/ --tokenizer bpe --steps 2000 --out runs/proj

    Stopped by Ctrl-C or a signal, it goes on with the same command and --resume.
    """

    recipe: str = ""
    """Settings of this recipe (see `spheret plan`) for every flag that is not given."""
    scheme: str = "spheret:p=1"
    """Residual scheme (see `spheret schemes`)."""
    lr: float | None = None
    """Peak learning rate; none given: 0.4/d for the width d, times the factor that the scheme asks for."""
    seed: int = 1
    """Decides the initial weights and the order of the batches."""
    out: Path = Path("runs/train")
    """Run folder."""
    resume: bool = False
    """Go on from the newest checkpoint in --out."""

    def __post_init__(self) -> None:
        with flags_checked():
            self.config(vocab_size=1)

    def config(self, vocab_size: int) -> TrainConfig:
        """The run's configuration, for a vocabulary of this size."""
        return self.train_config(
            canonical_name(self.scheme),
            lr=scheme_lr(self.scheme, n_embd=self.n_embd, n_layer=self.n_layer) if self.lr is None else self.lr,
            seed=self.seed,
            vocab_size=vocab_size,
        )


def with_recipe(words: list[str]) -> list[str]:
    """The words of a command line, with those of the recipe that `train --recipe NAME` asks for in front of its own
    flags, but for the flags that are given.

    UsageError: an unknown recipe or scheme.
    """
    if words[:1] != ["train"] or not (name := _given(words, "--recipe")):
        return words
    with flags_checked():
        planned = recipe(name, scheme=_given(words, "--scheme")).flags()
    given = {_flag(word) for word in words}
    kept, keep = [], True
    for word in planned:  # a flag and its values
        if word.startswith("--"):
            keep = word not in given
        if keep:
            kept.append(word)
    return ["train", *kept, *words[1:]]


def _given(words: list[str], flag: str) -> str | None:
    """Value of a flag on a command line, written `--flag value` or `--flag=value`."""
    for word, following in pairwise([*words, ""]):
        if _flag(word) == flag:
            return word.partition("=")[2] if "=" in word else following
    return None


def _flag(word: str) -> str:
    """`--n_layer=3` -> `--n-layer`, the spelling of flags that recipes use."""
    return word.partition("=")[0].replace("_", "-")


def run(command: TrainCommand) -> int:
    """Train with one line of progress per log record; returns the exit code."""
    console = output()
    _check_folder(command)
    check_buildable(command.config(vocab_size=1))
    dataset = prepare(command.data_config, progress=lambda line: say(console, line, "dim"))
    config = command.config(dataset.tokenizer.vocab_size)
    line = progress_line(config)
    if command.resume and (saved := checkpoints(command.out)):
        say(console, f"going on from {saved[-1].name} of {config.total_steps}")
    try:
        result = train(
            config,
            command.out,
            dataset=dataset,
            resume=command.resume,
            on_log=lambda record: say(console, line(record)),
        )
    except TrainingInterrupted as stop:
        kept = "" if checkpoints(command.out) else ", from the start, for want of a checkpoint"
        say(console, f"Stopped. {command.out} holds the run so far; go on with the same command and --resume{kept}.")
        return stop.exit_code
    say(console, summary(result))
    return 0 if result.outcome == "finished" else 1


def summary(result: RunResult) -> str:
    """What became of the run, in one or two lines."""
    loss = "none" if result.val_loss is None else f"{result.val_loss:.4f} ± {result.val_se or 0:.4f} nats/token"
    collapsed = ", collapsed to the unigram plateau" if result.collapsed else ""
    text = f"{result.outcome} at step {result.step}: validation loss {loss}{collapsed}"
    return "\n".join(
        [
            text,
            *([result.reason] if result.reason else []),
            f"{result.parameters:,} parameters, run folder {result.folder}",
        ]
    )


def progress_line(config: TrainConfig) -> Callable[[dict[str, Any]], str]:
    """Makes one line of a log record: step, losses, learning rate, gradient norm, speed, time left."""
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
    """UsageError where the folder holds a run already, or none to resume: known before the corpus is read."""
    out = command.out
    if command.resume and not (out / CONFIG).exists():
        raise UsageError(f"--resume: there is no run in {out}; leave --resume away to start one")
    if not command.resume and ((out / RUN).exists() or checkpoints(out)):
        raise UsageError(f"{out} already holds a run: go on with it by --resume, or choose another --out")


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
