"""Learnable scalars of a connection: the step size and the exponent. Both are float32 of shape (1,): sharding rejects
0-d parameters, and a bfloat16 scalar near 1 does not move by steps of 1e-3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections.base import ParameterRole
from spheret.geometry import LOG_P_RANGE, exponent_from_log


def check_start(p: float) -> None:
    """ValueError: an exponent cannot be learned from this start."""
    lowest, highest = (math.exp(bound) for bound in LOG_P_RANGE)
    if not lowest <= p <= highest:
        raise ValueError(f"p starts at {p}: a learned exponent stays in [{lowest:.2f}, {highest:.0f}]; start inside")


class Float32Module(nn.Module):
    """A module whose parameters and buffers stay float32 when the model is cast to a lower precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(t: Tensor) -> Tensor:
            cast = fn(t)
            lowered = cast.is_floating_point() and torch.finfo(cast.dtype).bits < 32
            return t.to(cast.device) if lowered else cast

        return super()._apply(keep, recurse)


class LearnedScalar(Float32Module):
    """One learnable number, as it is."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"weight": ParameterRole(decay=False)}

    def forward(self) -> Tensor:
        return self.weight


class StepSize(Float32Module):
    """``step = alpha * lambda``: a learnable scalar times a fixed decay over depth (arXiv 2608.02668).

    Args:
        start: initial value of alpha.
        lambda_l: the factor of this layer, a Python float: right after every way of loading a model.
        form: ``raw`` learns alpha itself; ``softplus`` learns ``a`` with ``alpha = softplus(a)``, always positive.
    """

    def __init__(self, start: float, lambda_l: float, form: str = "raw") -> None:
        super().__init__()
        if form not in ("raw", "softplus"):
            raise ValueError(f"alpha form {form!r}: choose raw or softplus")
        if not math.isfinite(start):
            raise ValueError(f"alpha = {start}: a step size starts at a finite number")
        if form == "softplus" and start <= 0:
            raise ValueError(f"alpha = {start}: a softplus step size starts above 0; use the raw form to start at 0")
        self.start, self.lambda_l, self.form = start, lambda_l, form
        self.weight = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        inverse_softplus = self.start + math.log(-math.expm1(-self.start)) if self.form == "softplus" else 0.0
        nn.init.constant_(self.weight, self.start if self.form == "raw" else inverse_softplus)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"weight": ParameterRole(decay=False)}

    def alpha(self) -> Tensor:
        return F.softplus(self.weight) if self.form == "softplus" else self.weight

    def forward(self) -> Tensor:
        return self.alpha() * self.lambda_l


class LearnedExponent(Float32Module):
    """A learnable exponent ``p = exp(rho)``; d(loss)/dp is cubic in the angle, so rho has its own learning-rate
    factor."""

    LR_SCALE = 10.0

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        check_start(start)
        self.start = start
        self.log_p = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_p, math.log(self.start))

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"log_p": ParameterRole(decay=False, lr_scale=self.LR_SCALE)}

    @torch.no_grad()
    def bound(self) -> None:
        """Bring rho back into its range. Outside, where p changes nothing, Adam would carry it on and on, and the way
        back would be as long."""
        self.log_p.clamp_(*LOG_P_RANGE)

    def forward(self) -> Tensor:
        return exponent_from_log(self.log_p)
