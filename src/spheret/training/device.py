"""Device and compute dtype of a run, and the versions and machine that run.json records.

On a machine without CUDA, nothing here calls its driver.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch


def resolve_device(name: str) -> torch.device:
    """The device; `auto` is CUDA if available, else the CPU. ValueError: PyTorch or this machine has no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            found = 0
        else:  # this also refuses names that PyTorch parses but has no device for, such as meta
            found = torch.get_device_module(device).device_count()
    except (RuntimeError, AttributeError) as error:
        raise ValueError(
            f"device = {name!r} is not one that PyTorch trains on; use auto, cpu, cuda or cuda:N"
        ) from error
    if not found:
        raise ValueError(f"device = {name!r}: PyTorch {torch.__version__} finds no {device.type} here; use auto or cpu")
    if (device.index or 0) >= found:
        raise ValueError(f"device = {name!r}: the last one here is {device.type}:{found - 1}; use it, or auto")
    return device


def refuse_ranks() -> None:
    """ValueError: a launcher such as torchrun started several processes of this command (WORLD_SIZE is above 1).

    There is no distributed training. Each rank would train the same run, into the same folder.
    """
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdigit() and int(ranks) > 1:
        raise ValueError(
            f"WORLD_SIZE is {ranks}, but training runs in one process: each of the {ranks} ranks would do the whole "
            "run again; start the command without torchrun, or with --nproc-per-node 1"
        )


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype; `auto` is bfloat16 on GPUs that support it in hardware, else float32."""
    if name == "auto":
        # Older GPUs emulate bfloat16, which is slower than float32.
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def warn_if_slow(name: str, device: torch.device) -> None:
    """Warn if `auto` means float32 on an accelerator: the run takes longer there, and more memory."""
    if name == "auto" and device.type != "cpu" and resolve_dtype(name, device) == torch.float32:
        warnings.warn(
            f"{device} has no bfloat16 in hardware, so the run computes in float32; dtype = bfloat16 emulates it",
            stacklevel=2,
        )


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """A reusable context in which matrix products run in `dtype`; parameters stay float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Token ids as a tensor on the device."""
    tensor = torch.from_numpy(array)
    # A copy from pinned memory overlaps with computation on the GPU.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the numerical libraries; `cuda` is None on a CPU build of PyTorch."""
    return {
        "spheret": _installed("spheret"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
    }


def machine(device: torch.device) -> dict[str, str | int | None]:
    """Processor, number of cores, threads that PyTorch uses, platform, and the device of the run."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    # platform.processor() is empty or just "x86_64" on Linux, so /proc/cpuinfo comes first.
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
