"""Monitors the training losses of one run and distinguishes spikes, which recover, from divergence, which does not.

The loss is smoothed by an exponential moving average (bias-corrected, memory of about 20 steps). There are three kinds
of event:

`nonfinite`  the loss is NaN or infinite.
`spike`      one loss is far above the smoothed loss: by more than `spike_sigmas` standard deviations of the recent
             noise, and by at least `margin` nats. It is only recorded, because most spikes recover.
`drift`      the smoothed loss was more than `margin` nats above its best for `patience` steps in a row, whether after
             a spike or a slow rise.

After `nonfinite` or `drift` the run counts as diverged: `DivergenceMonitor.diverged` holds the event until the loss
recovers. A run that ends has no steps left in which to recover, so `at_end` uses `memory` steps instead of `patience`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Literal

Kind = Literal["spike", "drift", "nonfinite"]


@dataclass(frozen=True)
class Event:
    """An event at loss number `index`, counted from 0."""

    kind: Kind
    index: int
    loss: float
    message: str


@dataclass
class DivergenceMonitor:
    """Detects spikes and divergence; call `update` with every training loss in order, in nats per token.

    Attributes:
        margin: smallest rise, in nats, above the smoothed loss (spike) or above its best (drift) that counts.
        spike_sigmas: standard deviations of the recent noise that a spike must exceed.
        patience: consecutive steps above the best smoothed loss that count as divergence.
        memory: steps that the moving average spans.
    """

    margin: float = 0.5
    spike_sigmas: float = 6.0
    patience: int = 100
    memory: int = 20

    def __post_init__(self) -> None:
        if self.margin <= 0 or self.spike_sigmas <= 0 or self.patience < 1 or self.memory < 1:
            raise ValueError(f"{self}: margin and spike_sigmas must be positive, patience and memory at least 1")
        self.count = 0  # losses seen, non-finite ones included
        self.spikes = 0  # spikes so far; a spike counts once, however many steps it lasts
        self.diverged: Event | None = None
        # Both averages start at 0. Divided by _weight, the sum of the weights so far, they are free of that bias.
        self._mean = 0.0
        self._variance = 0.0
        self._weight = 0.0
        self._best = math.inf
        self._above = 0
        self._in_spike = False

    @property
    def smoothed(self) -> float:
        """Bias-corrected moving average of the finite losses; NaN before the first."""
        return self._mean / self._weight if self._weight > 0 else math.nan

    def update(self, loss: float) -> Event | None:
        """Add the next loss and return the event it causes, if any. A spike is reported only at its first step."""
        index = self.count
        self.count += 1
        if not math.isfinite(loss):  # kept out of the averages, which would never recover from it
            return self._nonfinite(index, loss)
        # Before _smooth, because a loss is compared with the average of the losses before it.
        spike = self._spike(index, loss)
        self._smooth(loss)
        return self._drift(index, loss) or spike

    def _nonfinite(self, index: int, loss: float) -> Event | None:
        if self.diverged is not None and self.diverged.kind == "nonfinite":
            return None
        self.diverged = Event("nonfinite", index, loss, f"the training loss became {loss}")
        return self.diverged

    def _spike(self, index: int, loss: float) -> Event | None:
        if index < self.memory:  # too few losses to estimate the noise
            return None
        jump = loss - self.smoothed
        was_in_spike, self._in_spike = self._in_spike, jump > self._threshold()
        if was_in_spike or not self._in_spike:
            return None
        self.spikes += 1
        return Event("spike", index, loss, f"the training loss jumped from about {self.smoothed:.3f} to {loss:.3f}")

    def _threshold(self) -> float:
        return max(self.margin, self.spike_sigmas * math.sqrt(self._variance / self._weight))

    def _smooth(self, loss: float) -> None:
        keep = 1.0 - 1.0 / self.memory
        if self._weight > 0:
            # A spike enters the variance only up to the threshold: otherwise it would inflate the noise and hide the
            # next spike.
            jump = min(loss - self.smoothed, self._threshold()) if self._in_spike else loss - self.smoothed
            self._variance = keep * self._variance + (1.0 - keep) * jump * jump
        self._mean = keep * self._mean + (1.0 - keep) * loss
        self._weight = keep * self._weight + (1.0 - keep)
        self._best = min(self._best, self.smoothed)

    def _drift(self, index: int, loss: float) -> Event | None:
        if self.smoothed <= self._best + self.margin:
            self._above = 0
            self.diverged = None
            return None
        self._above += 1
        if self._above != self.patience:  # equality, so that one drift causes one event
            return None
        self.diverged = self._drift_event(index, loss)
        return self.diverged

    def _drift_event(self, index: int, loss: float) -> Event:
        message = (
            f"the smoothed training loss stayed more than {self.margin:g} above its best {self._best:.3f} "
            f"for {self._above} steps and is {self.smoothed:.3f}"
        )
        return Event("drift", index, loss, message)

    def at_end(self) -> Event | None:
        """The divergence of a run that ends now: `diverged`, or a drift of at least `memory` steps, else None."""
        if self.diverged is None and self._above >= self.memory:
            return self._drift_event(self.count - 1, self.smoothed)
        return self.diverged

    def state_dict(self) -> dict[str, object]:
        """Everything that `update` depends on, as plain values for a checkpoint."""
        state = {name: value for name, value in vars(self).items() if name != "diverged"}
        return {**state, "diverged": None if self.diverged is None else astuple(self.diverged)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Inverse of `state_dict`. ValueError: the keys are not those of this version."""
        if set(state) != set(vars(self)):
            raise ValueError(
                f"monitor state has keys {sorted(state)}, expected {sorted(vars(self))}; "
                "it was written by another version of spheret"
            )
        for name, value in state.items():
            setattr(self, name, value)
        diverged = state["diverged"]
        self.diverged = Event(*diverged) if isinstance(diverged, (tuple, list)) else None
