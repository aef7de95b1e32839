"""The changing part of a run: model, optimizer, monitor and counters. A checkpoint holds exactly this."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from spheret.diagnostics.monitor import DivergenceMonitor
from spheret.models import GPT
from spheret.training.config import TrainConfig
from spheret.training.device import refuse_ranks, resolve_device
from spheret.training.optimizer import build_adamw

STATE_PARTS = ("optimizer", "monitor", "counters", "rng")
"""What `TrainState.extras` holds."""
COUNTERS = ("step", "seconds", "skipped", "skipped_in_a_row", "last_loss", "last_loss_step")


@dataclass
class TrainState:
    """Model, optimizer and monitor after `step` optimizer steps, including skipped ones.

    `seconds` counts training time without evaluation; `skipped` counts steps whose gradient was not finite. `last_loss`
    is the newest finite training loss, and `last_loss_step` its step; None before the first.
    """

    model: GPT
    optimizer: torch.optim.AdamW
    monitor: DivergenceMonitor = field(default_factory=DivergenceMonitor)
    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    last_loss: float | None = None
    last_loss_step: int | None = None

    def note_loss(self, loss: float) -> None:
        """Remember the training loss of the current step, if it is finite."""
        if math.isfinite(loss):
            self.last_loss, self.last_loss_step = loss, self.step

    def extras(self) -> dict[str, Any]:
        """Everything except the weights, as tensors and plain values that torch.load(weights_only=True) accepts."""
        # With the random state, dropout after a resume draws the same masks as in an uninterrupted run.
        return {
            "optimizer": self.optimizer.state_dict(),
            "monitor": self.monitor.state_dict(),
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "rng": {"cpu": torch.get_rng_state(), "cuda": _cuda_rng_state(self.model)},
        }

    def load_extras(self, extras: dict[str, Any]) -> None:
        """Inverse of `extras`. Also sets the global random state."""
        self.optimizer.load_state_dict(extras["optimizer"])
        self.monitor.load_state_dict(extras["monitor"])
        for name, value in extras["counters"].items():
            setattr(self, name, value)
        torch.set_rng_state(extras["rng"]["cpu"])
        device = next(self.model.parameters()).device
        # A run may resume on another kind of device; a CPU checkpoint holds no CUDA state.
        if device.type == "cuda" and extras["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(extras["rng"]["cuda"], device)


def initial_state(config: TrainConfig, device: torch.device) -> TrainState:
    """Model and optimizer at step 0. Seeds the global random state."""
    torch.manual_seed(config.seed)
    # Weights are drawn on the CPU and then moved, so that a seed gives the same weights on every device.
    model = GPT(config.model).to(device)
    optimizer = build_adamw(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        lr_factors=config.lr_factors,
    )
    return TrainState(model, optimizer)


def check_buildable(config: TrainConfig) -> None:
    """Check, without data, that `initial_state` will work.

    ValueError: the machine does not have the device, the scheme makes no model of this shape, or a launcher started
    several ranks.
    """
    refuse_ranks()
    resolve_device(config.device)
    with torch.device("meta"):  # shapes only, no memory
        GPT(config.model)


def _cuda_rng_state(model: GPT) -> torch.Tensor | None:
    device = next(model.parameters()).device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
