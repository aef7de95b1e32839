"""What a recipe returns: the settings of `spheret train`, and the methods that they are meant for."""

from __future__ import annotations

from dataclasses import dataclass

from spheret.comparison.settings import RunSettings, flags, scheme_lr
from spheret.connections import canonical_name
from spheret.data import expected_vocab_size
from spheret.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run that can be repeated.

    Attributes:
        title: what it is, in a few words.
        settings: model, data and budget.
        scheme: the method of this run.
        schemes: the methods that the recipe is meant for; any other is allowed.
        lr: peak learning rate; None: 0.4/d for the width d, times the factor that the scheme asks for.
        seed: of the run.
    """

    title: str
    settings: RunSettings
    scheme: str
    schemes: tuple[str, ...]
    lr: float | None = None
    seed: int = 1

    def train_config(self, vocab_size: int | None = None) -> TrainConfig:
        """The run's configuration for a tokenizer of ``vocab_size`` tokens; by default as many as its name promises."""
        shape = self.settings
        return shape.train_config(
            canonical_name(self.scheme),
            lr=scheme_lr(self.scheme, n_embd=shape.n_embd, n_layer=shape.n_layer) if self.lr is None else self.lr,
            seed=self.seed,
            vocab_size=expected_vocab_size(shape.tokenizer) if vocab_size is None else vocab_size,
        )

    def flags(self) -> list[str]:
        """What to type behind `spheret train`."""
        rate = [] if self.lr is None else ["--lr", f"{self.lr:g}"]
        return ["--scheme", self.scheme, *rate, *flags(self.settings, always=("n_layer", "n_head", "n_embd", "steps"))]
