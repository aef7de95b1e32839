"""Pure functions on tensors: the sphere, the angle, the retraction."""

from spheret.geometry.angles import (
    LOG_P_RANGE,
    Angle,
    Exponent,
    LogExponent,
    angle,
    angle_exponent_slope,
    angle_slope,
    cos_and_sinc,
)
from spheret.geometry.retraction import Gradients, retract_rows, retract_vjp
from spheret.geometry.sphere import compute_dtype, norm, row_scale, rows

__all__ = [
    "LOG_P_RANGE",
    "Angle",
    "Exponent",
    "Gradients",
    "LogExponent",
    "angle",
    "angle_exponent_slope",
    "angle_slope",
    "compute_dtype",
    "cos_and_sinc",
    "norm",
    "retract_rows",
    "retract_vjp",
    "row_scale",
    "rows",
]
