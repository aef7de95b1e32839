"""GPUs by name: memory and peak speed as their vendor states them, which no program reaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Memory in bytes, and the peak of dense matrix products in FLOP/s, in bfloat16 and in float32 (without TF32, which
    PyTorch leaves off)."""

    name: str
    memory: float
    bfloat16: float
    float32: float

    def seconds(self, flops: float, *, mfu: float, bfloat16: bool = True) -> float:
        """How long ``flops`` take at the share ``mfu`` of the peak. ValueError: a share outside (0, 1]."""
        return flops / (check_mfu(mfu) * (self.bfloat16 if bfloat16 else self.float32))


# SXM boards; of the B200 what an HGX board leaves free of its 192 GB. Second hand, from tables of specifications.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100-80GB", 80e9, 312e12, 19.5e12),
        GPU("H100", 80e9, 989e12, 67e12),
        GPU("H200", 141e9, 989e12, 67e12),
        GPU("B200", 180e9, 2250e12, 75e12),
    )
}


def find_gpu(name: str) -> GPU:
    """The GPU of this name, in any case. ValueError: an unknown name; the message lists what there is."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise ValueError(f"gpu = {name!r} is not known: choose one of {', '.join(GPUS)}")
    return known[name.lower()]


def check_mfu(mfu: float) -> float:
    """``mfu``, or a ValueError: a share outside (0, 1]."""
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu = {mfu}: the share of the peak speed lies in (0, 1]; 0.4 is a good run")
    return mfu
