"""The norms that a scheme can select, and the stream that normalises at one or both of its ends."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spheret.connections.base import Stream
from spheret.connections.learned import Float32Module
from spheret.geometry import compute_dtype

NormKind = Literal["layernorm", "rmsnorm"]
OptionalNormKind = Literal["layernorm", "rmsnorm", "none"]
EPS = 1e-5  # GPT-2's
RMS_EPS = 1e-6  # used by nGPT's baseline and by Qwen3


def check_bias(kind: OptionalNormKind, bias: bool) -> None:
    """ValueError: a bias for a norm that has none."""
    if bias and kind != "layernorm":
        raise ValueError(f"bias = true: norm={kind} has no bias; use norm=layernorm, or omit bias")


def check_eps(eps: float) -> None:
    """ValueError: ``eps`` is not positive, so it cannot stabilise a norm."""
    if not eps > 0:
        raise ValueError(f"eps = {eps}: a norm needs a small number above 0, for example 1e-5")


class LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm, (..., dim) -> (..., dim) in the dtype of ``x``, to which gain and bias are cast."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``g x / sqrt(mean(x^2) + eps)`` (arXiv 1910.07467), (..., dim) -> (..., dim) in the dtype of ``x``.

    The gain is cast to the dtype of ``x``. Row statistics are float32 or better.
    """

    def __init__(self, dim: int, eps: float = RMS_EPS) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast, a bfloat16 x with a float32 gain would miss PyTorch's fused path.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


@overload
def build_norm(kind: NormKind, dim: int, *, eps: float = EPS, bias: bool = False) -> LayerNorm | RMSNorm: ...
@overload
def build_norm(
    kind: OptionalNormKind, dim: int, *, eps: float = EPS, bias: bool = False
) -> LayerNorm | RMSNorm | None: ...
def build_norm(kind: OptionalNormKind, dim: int, *, eps: float = EPS, bias: bool = False) -> LayerNorm | RMSNorm | None:
    """A norm over the last ``dim`` entries, its gain initially 1; None for ``none``.

    Raises:
        ValueError: a bias for a norm that has none.
    """
    check_bias(kind, bias)
    if kind == "none":
        return None
    return LayerNorm(dim, eps=eps, bias=bias) if kind == "layernorm" else RMSNorm(dim, eps)


class Float32Norm(Float32Module):
    """A norm that computes and returns float32 (float64 for float64 inputs), with a float32 gain."""

    def __init__(self, kind: NormKind, dim: int, *, eps: float = EPS) -> None:
        super().__init__()
        self.norm = build_norm(kind, dim, eps=eps)
        dtype = torch.get_default_dtype()
        if torch.finfo(dtype).bits < 32:  # not always: fake tensors cannot be converted in place
            self.norm.to(torch.float32)

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(compute_dtype(x)))


class NormedStream(Stream):
    """A norm after the embedding (``entry``), one before the head (``final``), or both."""

    def __init__(
        self,
        dim: int,
        *,
        entry: OptionalNormKind = "none",
        final: OptionalNormKind = "none",
        eps: float = EPS,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.entry_norm = build_norm(entry, dim, eps=eps, bias=bias and entry != "none")
        self.final_norm = build_norm(final, dim, eps=eps, bias=bias and final != "none")

    def enter(self, h: Tensor) -> Tensor:
        return h if self.entry_norm is None else self.entry_norm(h)

    def exit(self, h: Tensor, entry: Tensor | None = None) -> Tensor:
        return h if self.final_norm is None else self.final_norm(h)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Older checkpoints name these norms entry and final, or norm where there is only one.
        only = "final_norm" if self.entry_norm is None else "entry_norm"
        for old, new in (("entry", "entry_norm"), ("final", "final_norm"), ("norm", only)):
            for key in [key for key in state_dict if key.startswith(f"{prefix}{old}.")]:
                state_dict[f"{prefix}{new}{key.removeprefix(f'{prefix}{old}')}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)
