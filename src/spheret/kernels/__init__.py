"""The retraction as an operator: the C++ kernel, the Triton kernels, the formulas in PyTorch, and the dispatch."""

from spheret.kernels.retract import Backend, backend, retract, rotate, which_backend
from spheret.kernels.scale_norm import scale_norm, unit

__all__ = ["Backend", "backend", "retract", "rotate", "scale_norm", "unit", "which_backend"]
