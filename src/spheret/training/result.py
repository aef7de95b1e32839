"""What a run came to, as train() returns it and run.json keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spheret.training.files import RUN, read_json

Outcome = Literal["finished", "diverged", "interrupted"]

COLLAPSE_MARGIN = 0.03
"""A finished model whose validation loss is not this share below the unigram loss learnt token frequencies only."""


@dataclass(frozen=True)
class RunResult:
    """Losses in nats per token, None where there is no finite value; `train_loss` is smoothed over about 20 steps.

    `unigram_loss` is the loss of the training set's token frequencies on the validation windows. `tokens_per_s` is
    the median over the log lines, evaluations and checkpoints left out. `seconds` counts training time, that before a
    resume included.
    """

    folder: Path
    outcome: Outcome
    reason: str | None
    step: int
    tokens: int
    val_loss: float | None
    val_se: float | None
    val_bpb: float | None
    train_loss: float | None
    unigram_loss: float
    parameters: int
    tokens_per_s: float | None
    seconds: float
    spikes: int
    skipped_steps: int

    @property
    def collapsed(self) -> bool:
        """Whether the run finished without learning more than token frequencies."""
        if self.outcome != "finished" or self.val_loss is None:
            return False
        return self.val_loss > (1.0 - COLLAPSE_MARGIN) * self.unigram_loss

    @property
    def perplexity(self) -> float | None:
        """exp(val_loss)."""
        return None if self.val_loss is None or self.val_loss > 700 else math.exp(self.val_loss)

    def to_dict(self) -> dict[str, Any]:
        """The part of run.json that is the run's own; the environment is added by the trainer."""
        final = ("step", "tokens", "val_loss", "val_se", "val_bpb", "train_loss")
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "final": {name: getattr(self, name) for name in final},
            "unigram_loss": self.unigram_loss,
            "collapsed": self.collapsed,
            "parameters": self.parameters,
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "spikes": self.spikes,
            "skipped_steps": self.skipped_steps,
        }


def read_result(folder: Path) -> RunResult:
    """The result that run.json keeps. FileNotFoundError: the run has not ended, or the folder is none."""
    values = read_json(Path(folder) / RUN)
    own = {name: value for name, value in values.items() if name in RunResult.__dataclass_fields__}
    return RunResult(folder=Path(folder), **own, **values["final"])
