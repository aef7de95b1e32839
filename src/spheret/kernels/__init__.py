"""The retraction as an operator: a C++ kernel, Triton kernels, a traceable backward pass, and the dispatch."""

from spheret.kernels.retract import Backend, backend, retract, rotate, which_backend
from spheret.kernels.scale_norm import scale_norm, unit

__all__ = ["Backend", "backend", "retract", "rotate", "scale_norm", "unit", "which_backend"]
