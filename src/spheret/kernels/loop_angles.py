"""cos(theta), sin(theta)/beta and d theta/d beta of a group of rows at once, without branches or calls, so that they
vectorise.

At small widths the library's arctangent, sine and cosine would cost more than the rows themselves. The polynomials are
Chebyshev fits (mpmath ``chebyfit``), relative error below 1e-13 on the ranges given; one formula serves every p.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numba
import numpy as np

COMMON = {"error_model": "numpy", "nogil": True}
SUMS = {**COMMON, "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
TAN_PI_8 = math.tan(math.pi / 8)
# pi/2 in two parts, the first with so few digits that its multiples are exact
HALF_PI, HALF_PI_REST = 1.570796012878418, 3.139164786504813e-07
LARGE_ANGLE = 1e5  # beyond, the two parts do not suffice, and the library's functions take over


@numba.njit(inline="always", **SUMS)
def arctan(u):
    """arctan(u) for u >= 0: quotients bring the argument to |y| <= tan(pi/8)."""
    small, large = u <= TAN_PI_8, u >= 1 / TAN_PI_8
    top = u if small else (-1.0 if large else u - 1.0)
    bottom = 1.0 if small else (u if large else u + 1.0)
    offset = 0.0 if small else (math.pi / 2 if large else math.pi / 4)
    y = top / bottom
    z = y * y
    s = -0.058732884125488154 + z * 0.03064357643044098
    s = -0.09078349078551037 + z * (0.07563385785694479 + z * s)
    s = -0.14285690294890238 + z * (0.11110381840871641 + z * s)
    s = -0.3333333333078472 + z * (0.19999999602363222 + z * s)
    return offset + y * (0.999999999999973 + z * s)


@numba.njit(inline="always", **SUMS)
def cos_sin(theta):
    """cos and sin of 0 <= theta < LARGE_ANGLE, reduced to |r| <= pi/4."""
    turn = np.int32(theta * (2 / math.pi) + 0.5)
    quarter = np.float64(turn)
    r = (theta - quarter * HALF_PI) - quarter * HALF_PI_REST
    z = r * r
    s = -0.00019841263278795547 + z * (2.7555267811628643e-06 - z * 2.4756264849559612e-08)
    sin = r * (0.9999999999999957 + z * (-0.16666666666616434 + z * (0.008333333323840354 + z * s)))
    c = 2.480157851231878e-05 + z * (-2.7555229727213816e-07 + z * 2.06302094218755e-09)
    cos = 1.0 + z * (-0.49999999999999245 + z * (0.041666666666471334 + z * (-0.0013888888869903067 + z * c)))
    a, b = (sin, cos) if turn & 1 else (cos, sin)
    return (-a if (turn + 1) & 2 else a), (-b if turn & 2 else b)


@numba.njit(inline="always", **SUMS)
def update_size(rows, step, i):
    """beta, the size of the tangent update relative to h; finite where h is 0."""
    hh = rows[0, i]
    return abs(step) * math.sqrt(rows[2, i] / (hh if hh > 0 else 1.0))


@numba.njit(**SUMS)
def angles(rows, step, p, count):
    """The last three of ``rows`` (6, group), see ``loop_forward``, from the first three; p = inf is an ordinary value
    (u = 0)."""
    large = 0
    for i in range(count):
        beta = update_size(rows, step, i)
        u = beta / p
        theta = beta if u <= 1e-9 else p * arctan(u)  # a u that is NaN stays NaN
        cos, sin = cos_sin(theta)
        rows[3, i] = cos
        rows[4, i] = sin / beta if beta > 1e-18 else 1.0
        rows[5, i] = 1.0 / (1.0 + u * u)
        large += not theta < LARGE_ANGLE
    if large:
        _large_angles(rows, step, p, count)


@numba.njit(**SUMS)
def _large_angles(rows, step, p, count):
    for i in range(count):
        beta = update_size(rows, step, i)
        u = beta / p
        theta = beta if u < 1e-9 else p * math.atan(u)
        if not theta < LARGE_ANGLE:
            rows[3, i], rows[4, i] = math.cos(theta), math.sin(theta) / beta


@numba.njit(inline="always", **SUMS)
def exponent_slope(u):
    """d theta / d p = arctan(u) - u/(1 + u^2), by its series where that cancels."""
    if u < 0.02:
        return u**3 * (2 / 3 - u * u * (4 / 5 - u * u * (6 / 7 - u * u * 8 / 9)))
    return arctan(u) - u / (1 + u * u)
