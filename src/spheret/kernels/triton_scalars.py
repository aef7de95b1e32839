"""Row scalars inside a Triton kernel: correctly rounded quotients and roots, the angle and its derivatives.

``theta = p arctan(beta / p)`` for every p in (0, inf] by one formula, so all p cost the same. Triton's ``/`` and
``sqrt`` are approximate in float32, and an error to one side adds up over a thousand connections; its arctan lives
in a device library that the interpreter does not have.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

# pi/2 as a float32 and the rest, so that the same two numbers serve float32 and float64.
_QUARTER_TURN = tl.constexpr(1.57079637050628662109375)
_QUARTER_TURN_REST = tl.constexpr(-4.371139000186241e-8)


@triton.jit
def divide(a, b):
    """a / b, rounded to nearest."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def root(a):
    """sqrt(a), rounded to nearest."""
    return tl.sqrt(a) if a.dtype == tl.float64 else tl.sqrt_rn(a)


@triton.jit
def _arctan_tail(q):
    """``(arctan(u)/u - 1) / u^2`` with ``q = u^2`` in [0, 1]: minimax polynomial, error 3e-17."""
    tail = q * 1.80619546186121522e-5 - 0.000199961893779013821
    tail = tail * q + 0.00104960350849685151
    tail = tail * q - 0.00349588597391630952
    tail = tail * q + 0.00836893117845016214
    tail = tail * q - 0.0155351524754141761
    tail = tail * q + 0.023696731580048622
    tail = tail * q - 0.0312771890669963848
    tail = tail * q + 0.0374948681253524711
    tail = tail * q - 0.0426035663260165213
    tail = tail * q + 0.0473774957952777897
    tail = tail * q - 0.0525797333428411081
    tail = tail * q + 0.0588150687779365607
    tail = tail * q - 0.0666656469928910421
    tail = tail * q + 0.0769229897103321692
    tail = tail * q - 0.0909090859089193423
    tail = tail * q + 0.111111110934908281
    tail = tail * q - 0.142857142853841315
    tail = tail * q + 0.199999999999975322
    return tail * q - 0.333333333333333303


@triton.jit
def _folded(u):
    """``v = min(u, 1/u)``, ``v^2``, and ``arctan(v)/v - 1``."""
    v = tl.where(u > 1, divide(tl.full(u.shape, 1.0, u.dtype), tl.maximum(u, 1.0)), u)
    q = v * v
    return v, q, q * _arctan_tail(q)


@triton.jit
def arctan(u):
    """arctan of ``u >= 0``, infinity included."""
    v, _, bend = _folded(u)
    acute = v + v * bend
    return tl.where(u > 1, _QUARTER_TURN - (acute - _QUARTER_TURN_REST), acute)


@triton.jit
def rotation(beta, p):
    """``(1 - cos theta, sin(theta) / beta)`` of ``theta = p arctan(beta / p)``; at p = inf theta is beta.

    Both from the half angle, so that the versine keeps its digits where the angle is small and the two stay on one
    circle. Beyond ``beta = p`` whole quarter turns of ``theta/2 = p/2 (pi/2 - arctan(p/beta))`` are split off before
    anything is rounded, so that the sine keeps its digits near pi too (p = 2 and a large step).
    """
    u = divide(beta, p)
    v, _, bend = _folded(u)
    half, far = 0.5 * p, u > 1
    quarters = tl.where(far, tl.floor(half + 0.5), 0.0)
    part = half - quarters
    beyond = (part * _QUARTER_TURN + part * _QUARTER_TURN_REST) - half * (v + v * bend)
    rest = tl.where(far, beyond, 0.5 * (beta + beta * bend))
    swap = quarters - 2 * tl.floor(0.5 * quarters) == 1  # the signs of both cancel
    sin, cos = tl.sin(rest), tl.cos(rest)
    sin, cos = tl.where(swap, cos, sin), tl.where(swap, -sin, cos)
    tiny = 1e-150 if beta.dtype == tl.float64 else 1e-18
    return 2 * sin * sin, tl.where(beta > tiny, divide(2 * sin * cos, tl.maximum(beta, tiny)), 1.0)


@triton.jit
def angle_slope(beta, p):
    """``d theta / d beta = 1 / (1 + u^2)``, ``u = beta / p``."""
    u = divide(beta, p)
    return divide(tl.full(u.shape, 1.0, u.dtype), 1 + u * u)


@triton.jit
def angle_exponent_slope(beta, p):
    """``d theta / d p = arctan(u) - u / (1 + u^2)``; for ``u <= 1`` as ``u (bend + u^2 / (1 + u^2))``, whose terms do
    not cancel."""
    u = divide(beta, p)
    v, q, bend = _folded(u)
    part = divide(tl.full(u.shape, 1.0, u.dtype), 1 + q)
    return tl.where(u > 1, arctan(u) - v * part, v * (bend + q * part))
