"""Bytes that an optimizer step holds, counted before the run.

Every operation of the step runs on fake tensors, which have shapes and dtypes but no storage, so a model of any size
fits. The count is that of eager mode; `torch.compile`, which the trainer uses on GPUs, keeps less. It leaves out what
the device needs for itself: its context, the workspaces of its libraries, fragmentation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from spheret.models import GPT
from spheret.training import TrainConfig
from spheret.training.device import autocast
from spheret.training.optimizer import build_adamw


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one optimizer step.

    Attributes:
        weights: parameters and buffers.
        gradients: gradients of all parameters.
        optimizer: AdamW's two moments and its step counters.
        activations: what the forward pass of a micro-batch keeps for its backward pass. This includes the logits and,
            if the compute dtype is not that of the weights, the copies of the weights in the compute dtype.
        peak: the most that is held at once in any step after the first (which allocates the moments).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


def step_memory(config: TrainConfig, *, recompute: bool = False) -> StepMemory:
    """Memory of a step of this run.

    `recompute` keeps only the input of every block and repeats its forward pass in the backward pass (activation
    checkpointing, Chen et al., arXiv 1604.06174).
    """
    with FakeTensorMode(), _Live() as live:
        model = GPT(config.model)
        optimizer = build_adamw(model, lr=config.lr)
        if recompute:
            recompute_blocks(model)
        _fill_gradients(model)
        gradients = _bytes(p.grad for p in model.parameters())
        optimizer.step()  # allocates the moments
        # With accumulation, the gradients of earlier micro-batches are held while a later one runs.
        if config.grad_accum == 1:
            model.zero_grad(set_to_none=True)
        before, live.peak = live.now, live.now
        logits, loss = _forward(model, config)  # the trainer keeps the logits until the backward pass is done, too
        activations = live.now - before
        (loss / config.grad_accum).backward()
        del logits, loss
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
        optimizer.step()
        model.after_step()
        return StepMemory(
            weights=_bytes((*model.parameters(), *model.buffers())),
            gradients=gradients,
            optimizer=_bytes(tree_leaves(list(optimizer.state.values()))),
            activations=activations,
            peak=live.peak,
        )


def recompute_blocks(model: GPT) -> None:
    """Make every block of ``model`` keep only its input."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def in_bfloat16(config: TrainConfig) -> bool:
    """Whether the run's matrix products are in bfloat16.

    `auto` is taken to mean a GPU with bfloat16, except on device `cpu`.
    """
    return config.dtype == "bfloat16" or (config.dtype == "auto" and config.device != "cpu")


def _forward(model: GPT, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Logits and loss of one micro-batch, in the precision of the run."""
    rows = -(-config.batch_size // config.grad_accum)
    tokens = torch.zeros(rows, config.model.block_size, dtype=torch.int64)
    with autocast(tokens.device, torch.bfloat16 if in_bfloat16(config) else torch.float32):
        logits, loss = model(tokens, tokens)
    return logits, loss


def _fill_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


class _Live(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive: now, and at the peak so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # the address of the storage, which several tensors may share
        if key in self._sizes:  # a view, or the result of an operation in place
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
