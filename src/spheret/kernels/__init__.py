"""The retraction as an operator: compiled CPU loops, a hand-written backward over the reference formulas, and the
dispatch."""

from spheret.kernels.dispatch import Backend, retract, retract_for_two, which_backend
from spheret.kernels.scale_norm import scale_norm, unit

__all__ = ["Backend", "retract", "retract_for_two", "scale_norm", "unit", "which_backend"]
