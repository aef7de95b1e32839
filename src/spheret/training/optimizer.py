"""How parameters move: AdamW, its parameter groups, and the learning rate at each step.

The groups come from the roles that the modules declare, never from shapes or names. The learning rate is a pure
function of the step i: linear warm-up as in nanoGPT, lr (i + 1) / (warmup + 1), then one of

`cosine`    half a cosine from lr to the minimum (Loshchilov and Hutter, arXiv 1608.03983),
`wsd`       constant, then linear decay over the last `decay_fraction` of the steps (Hu et al., arXiv 2404.06395),
`constant`  no decay.

`cosine` and `wsd` reach min_lr_ratio * lr exactly at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from spheret.connections import ParameterRole, parameter_roles

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
    """Learning rate of optimizer step `step`, 0 <= step < steps. ValueError: step out of range, or unknown kind."""
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside the schedule of {steps} steps; use 0 to {steps - 1}")
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    floor = min_lr_ratio * lr
    if kind == "constant":
        return lr
    if kind == "cosine":
        # The last step is steps - 1, so progress is exactly 1 there. max(1, ...) avoids 0/0 in a run of one step.
        progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
        return floor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - floor)
    if kind == "wsd":
        # The decay never starts during warm-up: it is shortened to the steps that remain after it.
        decay_steps = max(1, min(round(decay_fraction * steps), steps - warmup_steps))
        progress = max(0, step + 1 - (steps - decay_steps)) / decay_steps
        return floor + (1.0 - progress) * (lr - floor)
    raise ValueError(f"unknown schedule {kind!r}; use cosine, wsd or constant")


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    roles: Mapping[str, ParameterRole] | None = None,
    *,
    lr_factors: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Trainable parameters, one group per (decay, lr_scale), with the keys that AdamW reads and `lr_scale`.

    `roles` maps parameter names to roles; by default the modules' `parameter_roles()`. `lr_factors` are
    factors on the learning rate, by `ParameterRole.kind`; 1 where none is given. ValueError: names the parameters
    without a role.
    """
    factors = lr_factors or {}
    roles = parameter_roles(model) if roles is None else roles
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(set(trainable) - set(roles))
    if missing:
        raise ValueError(
            f"no optimizer role for {', '.join(missing)}; "
            "give the owning module a parameter_roles() method that names it"
        )
    grouped: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        role = roles[name]
        grouped.setdefault((role.decay, role.lr_scale * factors.get(role.kind, 1.0)), []).append(parameter)
    # A checkpoint stores AdamW's moments by position, so the order of the groups must be the same in every process.
    return [
        {"params": grouped[decay, lr_scale], "weight_decay": weight_decay if decay else 0.0, "lr_scale": lr_scale}
        for decay, lr_scale in sorted(grouped, reverse=True)
    ]


def build_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    lr_factors: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), fused where the device allows it."""
    groups = parameter_groups(model, weight_decay, lr_factors=lr_factors)
    parameters = [parameter for group in groups for parameter in group["params"]]
    try:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_fused_supported(parameters))
    except RuntimeError:  # this PyTorch has no fused step for the device
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas)
    set_learning_rate(optimizer, lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to lr * lr_scale."""
    # torch's own LR schedulers are not used: they keep state, which a checkpoint would have to restore.
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _fused_supported(parameters: list[nn.Parameter]) -> bool:
    return all(p.device.type == "cuda" or (p.device.type == "cpu" and p.dtype == torch.float32) for p in parameters)
