"""The retraction as an operator: compiled CPU loops, a hand-written backward over the reference formulas, and the
dispatch."""

from spheret.kernels.dispatch import Backend, retract, which_backend
from spheret.kernels.unit import unit

__all__ = ["Backend", "retract", "unit", "which_backend"]
