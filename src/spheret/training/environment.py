"""What a run's numbers depend on besides its configuration: versions and machine, as recorded in run.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import numpy as np
import torch


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that do the arithmetic; `cuda` is None on a CPU build."""
    return {
        "spheret": _installed("spheret"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
    }


def machine(device: torch.device) -> dict[str, str | int | None]:
    """Processor, its cores, the threads PyTorch uses, the platform, and the device that trained."""
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
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
