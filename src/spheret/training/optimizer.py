"""AdamW whose parameter groups are asked from the modules, never guessed from shapes or names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spheret.connections import ParameterRole, parameter_roles


def parameter_groups(
    model: nn.Module, weight_decay: float, roles: Mapping[str, ParameterRole] | None = None
) -> list[dict[str, Any]]:
    """Trainable parameters in one group for each (decay, lr_scale), with the keys AdamW reads and `lr_scale`.

    `roles` defaults to what the modules answer. ValueError: names the parameters that no module answered for.
    """
    roles = parameter_roles(model) if roles is None else roles
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(set(trainable) - set(roles))
    if missing:
        raise ValueError(
            f"no module says whether to decay {', '.join(missing)}; "
            "give the module that owns it a parameter_roles() method that names it"
        )
    grouped: dict[ParameterRole, list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        grouped.setdefault(roles[name], []).append(parameter)
    return [
        {"params": grouped[role], "weight_decay": weight_decay if role.decay else 0.0, "lr_scale": role.lr_scale}
        for role in sorted(grouped, reverse=True)
    ]


def build_adamw(
    model: nn.Module, *, lr: float, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """Decoupled AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused where PyTorch has that for the device."""
    groups = parameter_groups(model, weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    try:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_fused_supported(parameters))
    except RuntimeError:  # the device has no fused step in this PyTorch
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas)
    set_learning_rate(optimizer, lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of the learning rate, lr * lr_scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _fused_supported(parameters: list[nn.Parameter]) -> bool:
    return all(p.device.type == "cuda" or (p.device.type == "cpu" and p.dtype == torch.float32) for p in parameters)
