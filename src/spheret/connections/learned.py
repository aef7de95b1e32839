"""Learned scalars and vectors of a scheme: step sizes, exponents, radii, scales.

All stay float32 when the model is cast to another dtype: a bfloat16 number near 1 cannot move by steps of 1e-3. A
scalar has shape (1,), because PyTorch's sharding rejects 0-d parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections.options import Scaling
from spheret.connections.weights import ParameterRole
from spheret.geometry import LOG_P_RANGE, exponent_from_log


def check_start(p: float) -> None:
    """ValueError: ``p`` is outside the range of a learned exponent."""
    lowest, highest = (math.exp(bound) for bound in LOG_P_RANGE)
    if not lowest <= p <= highest:
        raise ValueError(f"p starts at {p}: a learned exponent stays in [{lowest:.2f}, {highest:.0f}]; start inside")


class Float32Module(nn.Module):
    """A module whose parameters and buffers stay float32 when the model is cast to a lower precision, and when a state
    dict of a lower precision is assigned to it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Every .to(), .half() and .cuda() of a module goes through _apply, so this is the one place to intercept casts.
        def keep(t: Tensor) -> Tensor:
            cast = fn(t)
            return t.to(cast.device) if _is_lower(cast.dtype) else cast

        return super()._apply(keep, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # With assign=True these very tensors become the parameters. The dict is the loader's own copy.
        for name in [name for name in state_dict if name.startswith(prefix)]:
            if _is_lower(state_dict[name].dtype):
                state_dict[name] = state_dict[name].detach().float()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_lower(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).bits < 32


class LearnedScalar(Float32Module):
    """One learned number, shape (1,)."""

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
    """``step = alpha lambda_l``: a learned scalar times a constant of the layer (arXiv 2608.02668).

    Args:
        start: initial value of alpha.
        lambda_l: the constant of this layer. It is a Python float, not a buffer, so loading a model cannot lose it.
        form: ``raw`` learns alpha itself; ``softplus`` learns ``a`` with ``alpha = softplus(a)``, always positive.
        lr_scale: factor on the learning rate of alpha.
    """

    def __init__(self, start: float, lambda_l: float, form: str = "raw", lr_scale: float = 1.0) -> None:
        super().__init__()
        if form not in ("raw", "softplus"):
            raise ValueError(f"alpha form {form!r}: choose raw or softplus")
        if not math.isfinite(start):
            raise ValueError(f"alpha = {start}: a step size starts at a finite number")
        if form == "softplus" and start <= 0:
            raise ValueError(f"alpha = {start}: a softplus step size starts above 0; use the raw form to start at 0")
        if not 0 <= lr_scale < math.inf:
            raise ValueError(f"alpha_lr = {lr_scale}: a factor on a learning rate is a finite number, 0 or more")
        self.start, self.lambda_l, self.form, self.lr_scale = start, lambda_l, form, lr_scale
        self.weight = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # softplus^-1(y) = log(e^y - 1), written so that neither a large nor a small y overflows or cancels.
        inverse_softplus = self.start + math.log(-math.expm1(-self.start)) if self.form == "softplus" else 0.0
        nn.init.constant_(self.weight, self.start if self.form == "raw" else inverse_softplus)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"weight": ParameterRole(decay=False, lr_scale=self.lr_scale)}

    def alpha(self) -> Tensor:
        """The learned factor, shape (1,)."""
        return F.softplus(self.weight) if self.form == "softplus" else self.weight

    def forward(self) -> Tensor:
        return self.alpha() * self.lambda_l


class LearnedExponent(Float32Module):
    """A learned exponent ``p = exp(rho)``, where rho is the parameter ``log_p``."""

    # The gradient of the loss with respect to p is cubic in the angle, so at small angles p needs a larger learning
    # rate than the other parameters.
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
        """Clamp rho to ``LOG_P_RANGE``, in place."""
        # Outside the range p is constant, but Adam would keep moving rho outwards, and rho would need as many steps to
        # come back.
        self.log_p.clamp_(*LOG_P_RANGE)

    def forward(self) -> Tensor:
        return exponent_from_log(self.log_p)


class Radius(Float32Module):
    """The sphere's radius: one scalar, initially sqrt(d), so that a hidden state has root mean square 1."""

    def __init__(self, dim: int, learn: bool = True) -> None:
        super().__init__()
        self.start = math.sqrt(dim)
        self.gain = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=learn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"gain": ParameterRole(decay=False)}

    def forward(self) -> Tensor:
        return self.gain


class ScaledVector(Float32Module):
    """A learned vector (dim,) in stored form, ``used = stored * start / scale`` (arXiv 2410.01131, section 2.5).

    Adam moves every stored number by about the learning rate, whatever its size. A vector that is stored as ``scale``
    and used as ``start`` moves by ``start / scale`` times that: the ratio sets its effective learning rate.

    Args:
        dim: number of entries.
        scaling: the start of every entry, and the number stored for it at the start.
        positive: use the absolute value of the learned vector.

    Raises:
        ValueError: a start or a scale of 0, which would have no gradient.
    """

    def __init__(self, dim: int, scaling: Scaling, *, positive: bool = False) -> None:
        super().__init__()
        for name, value in zip(scaling._fields, scaling, strict=True):
            if value == 0:
                raise ValueError(f"a learned scale with {name} = 0 never moves: give another number")
        self.scaling, self.positive = scaling, positive
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scaling.scale)

    def parameter_roles(self) -> dict[str, ParameterRole]:
        return {"weight": ParameterRole(decay=False)}

    def forward(self) -> Tensor:
        used = self.weight * (self.scaling.start / self.scaling.scale)
        return used.abs() if self.positive else used


def scaling(start: float, scale: float | None, dim: int) -> Scaling:
    """The stored form of a vector that starts at ``start`` and is stored as ``scale``; None: nGPT's 1/sqrt(d)."""
    return Scaling(start, 1 / math.sqrt(dim) if scale is None else scale)
