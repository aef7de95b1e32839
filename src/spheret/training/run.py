"""What stays the same while a run trains, and what it computes from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spheret.data import Dataset, sample_batch
from spheret.diagnostics.probe import probe
from spheret.evaluation import Evaluation
from spheret.training.accumulate import accumulate_gradients
from spheret.training.config import TrainConfig
from spheret.training.device import autocast, resolve_device, resolve_dtype, to_device
from spheret.training.state import TrainState
from spheret.training.validation import Validation

PROBE_WINDOWS = 4


@dataclass(frozen=True)
class Run:
    """Configuration, folder, data, device, and the autocast context of every forward pass."""

    config: TrainConfig
    out: Path
    dataset: Dataset
    device: torch.device
    precision: AbstractContextManager[object]
    validation: Validation

    @classmethod
    def build(cls, config: TrainConfig, out: Path, dataset: Dataset) -> Run:
        """ValueError: a device that is not there, or data that does not fit the model."""
        device = resolve_device(config.device)
        precision = autocast(device, resolve_dtype(config.dtype, device))
        return cls(config, out, dataset, device, precision, Validation.build(config, dataset))

    def gradients(self, forward: Callable[..., Any], step: int) -> torch.Tensor:
        """Add the gradients of step number `step` to the model behind `forward`; the training loss, a scalar."""
        config = self.config
        x, y = sample_batch(
            self.dataset.train,
            batch_size=config.batch_size,
            block_size=config.model.block_size,
            seed=config.seed,
            step=step,
        )
        return accumulate_gradients(
            forward, x, y, micro_batches=config.grad_accum, device=self.device, context=self.precision
        )

    def evaluate(self, state: TrainState) -> Evaluation:
        """Loss on the validation windows."""
        with self.precision:
            return self.validation.evaluate(state.model)

    def probe(self, state: TrainState) -> dict[str, Any]:
        """Per-sublayer diagnostics on the first validation windows."""
        with self.precision:
            return dict(probe(state.model, to_device(self.validation.x[:PROBE_WINDOWS], self.device)))
