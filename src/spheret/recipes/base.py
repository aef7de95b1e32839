"""A recipe is one run that can be repeated. Its docstring says where every number comes from.

*Read* means read in the authors' text or code, *second hand* taken from somebody else's notes, *derived* computed from
these, *guessed* not stated anywhere that we know of, and *ours* chosen by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from spheret.connections import canonical_name
from spheret.data import expected_vocab_size
from spheret.training import TrainConfig
from spheret.training.settings import RunSettings, flags, scheme_lr


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of one call of `spheret train`, and the schemes that they are meant for.

    Attributes:
        title: what the run is, in a few words.
        settings: model, data and budget.
        scheme: the scheme of this run.
        schemes: the schemes that the recipe is meant for. Any other scheme is allowed.
        lr: peak learning rate. None: 0.8/d for the width d, times the scheme's own factor.
        seed: sets the initial weights and the order of the batches.
    """

    title: str
    settings: RunSettings
    scheme: str
    schemes: tuple[str, ...]
    lr: float | None = None
    seed: int = TrainConfig.seed

    def train_config(self, vocab_size: int | None = None) -> TrainConfig:
        """The run's configuration for a tokenizer of ``vocab_size`` tokens (default: the size for its name)."""
        shape = self.settings
        return shape.train_config(
            canonical_name(self.scheme),
            lr=scheme_lr(self.scheme, n_embd=shape.n_embd, n_layer=shape.n_layer) if self.lr is None else self.lr,
            seed=self.seed,
            vocab_size=expected_vocab_size(shape.tokenizer) if vocab_size is None else vocab_size,
        )

    def flags(self) -> list[str]:
        """The words to type after `spheret train` for the same run."""
        rate = [] if self.lr is None else ["--lr", f"{self.lr:g}"]
        return ["--scheme", self.scheme, *rate, *flags(self.settings, always=("n_layer", "n_head", "n_embd", "steps"))]


# So deep, narrow and short that 28 runs take minutes on two cores and still differ between learning rates. A run of
# seconds needs no checkpoints.
COMPARED = RunSettings(
    n_layer=12, n_head=2, n_embd=64, block_size=64, batch_size=8, steps=200, device="cpu", checkpoint_interval=0
)
COMPARED_SCHEMES = ("pre-ln", "keel", "geonorm", "spheret")


def cpu_demo(scheme: str = "spheret") -> Recipe:
    """One of the runs that `make demo` compares: 12 blocks of width 64 on the bytes of Python's standard library.

    All numbers are ours, the defaults of `spheret compare`. Learning rate: 0.8/d, times the scheme's own factor.
    """
    return Recipe(
        title="one run of `make demo`, on Python's source", settings=COMPARED, scheme=scheme, schemes=COMPARED_SCHEMES
    )
