"""RMSNorm (arXiv 1910.07467) whose gain follows the dtype of its input.

``x`` in bfloat16 with a float32 gain, as under autocast, leaves PyTorch's fused path; the statistics are float32 in
either.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


class RMSNorm(nn.RMSNorm):
    """``g x / sqrt(mean(x^2) + 1e-6)``, (..., dim) -> (..., dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
