"""torch.compile with a way back: a machine without a working compiler trains in eager mode instead of failing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def wants_compile(mode: str, device: torch.device) -> bool:
    """`auto` compiles on CUDA only: on a CPU compiling takes longer than most runs gain."""
    return mode == "on" or (mode == "auto" and device.type == "cuda")


def compile_or_eager(model: nn.Module, trial: Callable[[Callable[..., Any]], object]) -> Callable[..., Any]:
    """The compiled model, or `model` itself after one warning with the reason when compiling fails.

    `trial` runs one forward and backward pass through what it is given, as training will: the compiler starts only
    then. Gradients and random state are as before afterwards. Running out of device memory is no failure of the
    compiler and is raised.
    """
    forward: Callable[..., Any] = torch.compile(model)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            trial(forward)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            warnings.warn(f"torch.compile failed, training continues in eager mode: {reason}", stacklevel=2)
            torch.compiler.reset()
            forward = model
    model.zero_grad(set_to_none=True)
    return forward
