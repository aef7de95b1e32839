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
    """``(arctan(u)/u - 1) / u^2`` with ``q = u^2`` in [0, 1]: minimax polynomial, error of the arctan 2e-19."""
    tail = 5.42357771220497436e-6
    tail = tail * q - 0.0000681501430177686008
    tail = tail * q + 0.000407886789880900176
    tail = tail * q - 0.00155375334026123326
    tail = tail * q + 0.00425511482648049446
    tail = tail * q - 0.00899743399427727112
    tail = tail * q + 0.0154646946103231855
    tail = tail * q - 0.0225667142082114888
    tail = tail * q + 0.0291212446088548328
    tail = tail * q - 0.0345568674962898907
    tail = tail * q + 0.03905116247694501
    tail = tail * q - 0.0431812689972166354
    tail = tail * q + 0.0475438875904703303
    tail = tail * q - 0.0526164160913092945
    tail = tail * q + 0.0588211335100413071
    tail = tail * q - 0.0666663767995403718
    tail = tail * q + 0.076923050864584887
    tail = tail * q - 0.0909090892381358569
    tail = tail * q + 0.111111111038999854
    tail = tail * q - 0.142857142855224522
    tail = tail * q + 0.199999999999972817
    return tail * q - 0.33333333333333318


@triton.jit
def _folded(u):
    """``v = min(u, 1/u)``, ``v^2``, and ``arctan(v)/v - 1``."""
    v = tl.where(u > 1, divide(tl.full(u.shape, 1.0, u.dtype), tl.maximum(u, 1.0)), u)
    q = v * v
    return v, q, q * _arctan_tail(q)


@triton.jit
def _complement(v, bend):
    """``pi/2 - arctan(v)``."""
    return _QUARTER_TURN - ((v + v * bend) - _QUARTER_TURN_REST)


@triton.jit
def arctan(u):
    """arctan of ``u >= 0``, infinity included."""
    v, _, bend = _folded(u)
    return tl.where(u > 1, _complement(v, bend), v + v * bend)


@triton.jit
def angle(beta, p):
    """``p arctan(beta / p)``; at p = inf it is beta."""
    u = divide(beta, p)
    v, _, bend = _folded(u)
    return tl.where(u > 1, p * _complement(v, bend), beta + beta * bend)


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
    return tl.where(u > 1, _complement(v, bend) - v * part, v * (bend + q * part))


@triton.jit
def versine_and_sinc(beta, theta):
    """``(1 - cos theta, sin(theta) / beta)``, both from the half angle so that the versine keeps its digits where the
    angle is small and the two stay on one circle."""
    tiny = 1e-150 if beta.dtype == tl.float64 else 1e-18
    sin, cos = tl.sin(theta * 0.5), tl.cos(theta * 0.5)
    sinc = tl.where(beta > tiny, divide(2 * sin * cos, tl.maximum(beta, tiny)), 1.0)
    return 2 * sin * sin, sinc
