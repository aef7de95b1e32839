"""Where and in which precision a run computes. Without CUDA nothing here makes a call that needs its driver."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. ValueError: a device this machine or PyTorch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known to PyTorch; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} asked for, but PyTorch {torch.__version__} sees no CUDA; use device=cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute dtype: `auto` is bfloat16 on CUDA devices that have it in hardware, float32 elsewhere."""
    if name == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Reusable context in which matrix products run in `dtype`; parameters stay float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Token ids as a tensor on the device; the copy to a CUDA device overlaps with what runs there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
