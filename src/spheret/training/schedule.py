"""Learning-rate schedules as one pure function of the step.

Linear warm-up as in nanoGPT, lr (i + 1) / (warmup + 1), then one of
`cosine`    half a cosine from lr to the minimum (Loshchilov and Hutter, arXiv 1608.03983),
`wsd`       constant, then linear decay over the last `decay_fraction` of the steps (Hu et al., arXiv 2404.06395),
`constant`  no decay.
The two decays reach min_lr_ratio * lr exactly at the last step.
"""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["cosine", "wsd", "constant"]


def learning_rate(
    step: int,
    *,
    lr: float,
    steps: int,
    warmup_steps: int = 0,
    kind: ScheduleKind = "cosine",
    min_lr_ratio: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """Learning rate of optimizer step number `step`, 0 <= step < steps. ValueError: step outside, or unknown kind."""
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside the schedule of {steps} steps; use 0 to {steps - 1}")
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    floor = min_lr_ratio * lr
    if kind == "constant":
        return lr
    if kind == "cosine":
        progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
        return floor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - floor)
    if kind == "wsd":
        decay_steps = max(1, min(round(decay_fraction * steps), steps - warmup_steps))
        progress = max(0, step + 1 - (steps - decay_steps)) / decay_steps
        return floor + (1.0 - progress) * (lr - floor)
    raise ValueError(f"unknown schedule {kind!r}; use cosine, wsd or constant")
