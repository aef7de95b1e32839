"""The retraction as an operator: a hand-written backward over the reference formulas, and the dispatch that serves
it."""

from spheret.kernels.dispatch import retract

__all__ = ["retract"]
