"""The retraction as Triton kernels: forward and backward read or write each tensor once.

A program holds ``BLOCK_N`` whole rows of width d in registers, padded to ``BLOCK_D`` columns with zeros. The formulas
and names are the same as in ``geometry.sphere`` and ``geometry.retraction``: ``x = h/a``, ``y = f/b``, ``z = y - c x``,
``t = step b/a``. The scales a and b are powers of two, so dividing by them is exact. Row scalars have shape
``(BLOCK_N,)``.

Statistics are float32, and every result is rounded once, when it is stored. (Float64 rows take the formulas.) Eight
numbers per row are kept for the backward pass: a (0 for a row without direction), b, the two parts of c, ``|x|^2``,
``|z|^2``, ``1 - cos(theta)`` and ``sin(theta)/beta``.

``alpha_ptr``, ``p_ptr`` and ``radius_ptr`` point to one number each; without ``radius_ptr`` the norm of h is kept.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

STATS = 8
_STATS = tl.constexpr(STATS)

# pi/2 rounded to float32, and the remainder
_HALF_PI = tl.constexpr(1.57079637050628662109375)
_HALF_PI_REST = tl.constexpr(-4.371139000186241e-8)
# geometry.LOG_P_RANGE
_LOG_P_MIN, _LOG_P_MAX = tl.constexpr(-3.0), tl.constexpr(5.0)
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number


# --- arithmetic that Triton only approximates ---
#
# Triton's ``/`` and ``sqrt`` are approximate in float32, and a biased error adds up over a thousand connections.
# Triton's arctan is in a device library that the interpreter does not have.


@triton.jit
def _arctan_tail(q):
    """``(arctan(u)/u - 1) / u^2`` with ``q = u^2`` in [0, 1]: Chebyshev fit (mpmath), error 4e-10."""
    tail = (-0.000936299472 * q + 0.00620725453378) * q - 0.0192610813228
    tail = ((tail * q + 0.0383274459831) * q - 0.0576071608313) * q + 0.074174969643
    tail = ((tail * q - 0.0903674234207) * q + 0.111047067886) * q - 0.142853179639
    return (tail * q + 0.199999902759) * q - 0.333333332933


@triton.jit
def _folded(u):
    """``v = min(u, 1/u)``, ``v^2``, and ``arctan(v)/v - 1``."""
    v = tl.where(u > 1, tl.div_rn(tl.full(u.shape, 1.0, tl.float32), tl.maximum(u, 1.0)), u)
    q = v * v
    return v, q, q * _arctan_tail(q)


@triton.jit
def arctan(u):
    """arctan of ``u >= 0``, infinity included."""
    v, _, bend = _folded(u)
    acute = v + v * bend
    return tl.where(u > 1, _HALF_PI - (acute - _HALF_PI_REST), acute)


@triton.jit
def _power_of_two(largest):
    """A positive number rounded down to a power of two, clamped so that its reciprocal is a normal number too."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power, _TINY), 8.507059173023462e37)


@triton.jit
def _reciprocal(power):
    """1 over a power of two, exactly, by its exponent bits."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


# --- the angle: theta = p arctan(beta / p); one formula for every p in (0, inf], so all p cost the same ---


@triton.jit
def rotation(beta, p):
    """``(1 - cos theta, sin(theta) / beta)``; at p = inf theta is beta.

    Both come from the half angle: the versine keeps its digits at small angles, and the two stay on one circle. For
    ``beta > p``, whole quarter turns of ``theta/2 = p/2 (pi/2 - arctan(p/beta))`` are subtracted before anything is
    rounded, so that the sine keeps its digits near pi too (p = 2 and a large step).
    """
    u = tl.div_rn(beta, p)
    v, _, bend = _folded(u)
    half, far = 0.5 * p, u > 1
    quarters = tl.where(far, tl.floor(half + 0.5), 0.0)
    part = half - quarters
    beyond = (part * _HALF_PI + part * _HALF_PI_REST) - half * (v + v * bend)
    rest = tl.where(far, beyond, 0.5 * (beta + beta * bend))
    swap = quarters - 2 * tl.floor(0.5 * quarters) == 1  # the signs of both cancel
    sin, cos = tl.sin(rest), tl.cos(rest)
    sin, cos = tl.where(swap, cos, sin), tl.where(swap, -sin, cos)
    return _versine_and_sinc(beta, sin, cos)


@triton.jit
def _versine_and_sinc(beta, sin, cos):
    """``(1 - cos theta, sin(theta) / beta)`` from the sine and cosine of theta/2."""
    return 2 * sin * sin, tl.where(beta > 1e-18, tl.div_rn(2 * sin * cos, tl.maximum(beta, 1e-18)), 1.0)


@triton.jit
def angle_slope(beta, p):
    """``d theta / d beta = 1 / (1 + u^2)``, ``u = beta / p``."""
    u = tl.div_rn(beta, p)
    return tl.div_rn(tl.full(u.shape, 1.0, tl.float32), 1 + u * u)


@triton.jit
def angle_exponent_slope(beta, p):
    """``d theta / d p = arctan(u) - u / (1 + u^2)``. For ``u <= 1`` it is computed as ``u (bend + u^2 / (1 + u^2))``,
    which hardly cancels."""
    u = tl.div_rn(beta, p)
    v, q, bend = _folded(u)
    part = tl.div_rn(tl.full(u.shape, 1.0, tl.float32), 1 + q)
    return tl.where(u > 1, arctan(u) - v * part, v * (bend + q * part))


# --- rows in registers ---


@triton.jit
def _grid(n, d, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row numbers (BLOCK_N,), 64-bit because row offsets exceed 2^31; columns (1, BLOCK_D); the masks of both."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)[None, :]
    live = row < n
    return row, column, live, live[:, None] & (column < d)


@triton.jit
def _load_rows(rows_ptr, row, column, stride, mask):
    return tl.load(rows_ptr + row[:, None] * stride + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(rows_ptr, row, column, d, mask, values):
    tl.store(rows_ptr + row[:, None] * d + column, values, mask=mask)


@triton.jit
def _load_scalar(scalar_ptr, row):
    """One number, repeated for every row."""
    return tl.full(row.shape, 1.0, tl.float32) * tl.load(scalar_ptr).to(tl.float32)


@triton.jit
def _load_exponent(p_ptr, row, LOG_P: tl.constexpr):
    p = _load_scalar(p_ptr, row)
    if LOG_P:
        p = tl.exp(tl.where(p < _LOG_P_MIN, _LOG_P_MIN, tl.where(p > _LOG_P_MAX, _LOG_P_MAX, p)))  # NaN stays
    return p


@triton.jit
def measure(h, f):
    """x and z (BLOCK_N, BLOCK_D) and the first six statistics of rows h and f."""
    largest_h, largest_f = tl.max(tl.abs(h), 1), tl.max(tl.abs(f), 1)
    a = _power_of_two(largest_h)
    b = tl.where(largest_f > _TINY, _power_of_two(largest_f), a)
    x, y = h * _reciprocal(a)[:, None], f * _reciprocal(b)[:, None]
    xx = tl.sum(x * x, 1)
    rho2 = tl.where(xx < 1, 1.0, xx)
    c1 = tl.div_rn(tl.sum(x * y, 1), rho2)
    z = y - c1[:, None] * x
    # Second Gram-Schmidt step: if f is parallel to h, z is rounding noise, which is partly radial.
    c2 = tl.div_rn(tl.sum(x * z, 1), rho2)
    z = z - c2[:, None] * x
    a = tl.where(largest_h > _TINY, a, 0.0)
    return x, z, a, b, c1, c2, rho2, tl.sum(z * z, 1)


@triton.jit
def _scale(h, f, a, b, c1, c2):
    """x and z of rows with known statistics, by the same operations as in `measure`."""
    x = h * _reciprocal(tl.maximum(a, _TINY))[:, None]
    y = f * _reciprocal(b)[:, None]
    return x, (y - c1[:, None] * x) - c2[:, None] * x


@triton.jit
def relative_step(step, a, b):
    """``t``, clamped so that its square does not overflow, and the step that this ``t`` corresponds to; both 0 for a
    row without direction."""
    safe = tl.maximum(a, _TINY)
    t = step * tl.minimum(b * _reciprocal(safe), 3.4e38)
    bound = tl.where(t > 1e16, 1e16, tl.where(t < -1e16, -1e16, t))  # NaN stays
    acting = tl.where(bound == t, step, bound * (safe * _reciprocal(b)))
    return tl.where(a > 0, bound, 0.0), tl.where(a > 0, acting, 0.0)


@triton.jit
def _update_size(t, rho2, nu2):
    """beta = ``|w| / |h|``."""
    return tl.abs(t) * tl.sqrt_rn(tl.div_rn(nu2, rho2))


# --- kernels ---


@triton.jit
def retract_kernel(
    h_ptr, f_ptr, alpha_ptr, p_ptr, radius_ptr, theta_ptr, out_ptr, branch_ptr, stats_ptr, lambda_l, n, d, h_stride,
    f_stride, LOG_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute out, its copy for the branch in another dtype (unless None), and stats (n, 8) from h and f. Angles in
    ``theta_ptr`` (n,), unless None, replace the angles from p."""
    row, column, live, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    h = _load_rows(h_ptr, row, column, h_stride, mask)
    x, z, a, b, c1, c2, rho2, nu2 = measure(h, _load_rows(f_ptr, row, column, f_stride, mask))
    t, _ = relative_step(_load_scalar(alpha_ptr, row) * lambda_l, a, b)
    beta = _update_size(t, rho2, nu2)
    if theta_ptr is None:
        versine, sinc = rotation(beta, _load_exponent(p_ptr, row, LOG_P))
    else:
        half = 0.5 * tl.load(theta_ptr + row, mask=live, other=0.0).to(tl.float32)
        versine, sinc = _versine_and_sinc(beta, tl.sin(half), tl.cos(half))
    at = stats_ptr + row * _STATS
    tl.store(at, a, mask=live)
    tl.store(at + 1, b, mask=live)
    tl.store(at + 2, c1, mask=live)
    tl.store(at + 3, c2, mask=live)
    tl.store(at + 4, rho2, mask=live)
    tl.store(at + 5, nu2, mask=live)
    tl.store(at + 6, versine, mask=live)
    tl.store(at + 7, sinc, mask=live)
    factor = tl.maximum(a, _TINY)
    if radius_ptr is not None:
        factor = tl.div_rn(_load_scalar(radius_ptr, row), tl.sqrt_rn(rho2))
    # h plus its change, instead of C h + S w: at small angles C would round to 1 and the norm would grow.
    moved = factor[:, None] * (x + ((sinc * t)[:, None] * z - versine[:, None] * x))
    _store_rows(out_ptr, row, column, d, mask, moved)
    if branch_ptr is not None:
        _store_rows(branch_ptr, row, column, d, mask, moved)


@triton.jit
def retract_backward_kernel(
    g_ptr, g_branch_ptr, h_ptr, f_ptr, stats_ptr, alpha_ptr, p_ptr, radius_ptr, slope_ptr, dh_ptr, df_ptr, sums_ptr,
    lambda_l, n, d, g_stride, g_branch_stride, h_stride, f_stride, LOG_P: tl.constexpr, NEED_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients by the formulas of ``geometry.retract_vjp``, for the sum of g and g_branch (unless None).

    ``sums_ptr`` (3, n) receives the gradients of alpha, p (0 unless NEED_P) and radius, row by row. ``slope_ptr`` (n,)
    holds the slopes of a custom angle function; the second row of sums then holds the gradients of theta.
    """
    row, column, live, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    at = stats_ptr + row * _STATS
    a, b = tl.load(at, mask=live, other=0.0), tl.load(at + 1, mask=live, other=1.0)
    c1, c2 = tl.load(at + 2, mask=live, other=0.0), tl.load(at + 3, mask=live, other=0.0)
    rho2, nu2 = tl.load(at + 4, mask=live, other=1.0), tl.load(at + 5, mask=live, other=0.0)
    versine, sinc = tl.load(at + 6, mask=live, other=0.0), tl.load(at + 7, mask=live, other=1.0)
    h = _load_rows(h_ptr, row, column, h_stride, mask)
    x, z = _scale(h, _load_rows(f_ptr, row, column, f_stride, mask), a, b, c1, c2)
    g = _load_rows(g_ptr, row, column, g_stride, mask)
    if g_branch_ptr is not None:
        g += _load_rows(g_branch_ptr, row, column, g_branch_stride, mask)
    t, acting = relative_step(_load_scalar(alpha_ptr, row) * lambda_l, a, b)
    beta = _update_size(t, rho2, nu2)
    p = _load_exponent(p_ptr, row, LOG_P)
    slope = angle_slope(beta, p)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + row, mask=live, other=1.0).to(tl.float32)
    cos, k = 1 - versine, sinc * t
    gx, e = tl.sum(g * x, 1), tl.sum(g * z, 1)
    a1, safe_nu2 = tl.div_rn(gx, rho2), tl.maximum(nu2, _TINY)
    m = (slope * cos - sinc) * tl.div_rn(e, safe_nu2) - slope * k * a1
    df_over_step = sinc[:, None] * g - (sinc * a1)[:, None] * x + m[:, None] * z
    dh = cos[:, None] * g - ((c1 + c2) * t)[:, None] * df_over_step
    dh = dh - (k * a1)[:, None] * z - (t * m * tl.div_rn(nu2, rho2))[:, None] * x
    scale = tl.full(row.shape, 1.0, tl.float32)
    along = tl.div_rn(cos * gx + k * e, tl.sqrt_rn(rho2))  # <g, h'> / radius
    if radius_ptr is not None:
        radius = _load_scalar(radius_ptr, row)
        scale = tl.where(a > 0, tl.div_rn(radius, tl.maximum(a, _TINY) * tl.sqrt_rn(rho2)), 0.0)
        dh = scale[:, None] * dh - tl.div_rn(scale * along, tl.sqrt_rn(rho2))[:, None] * x
    _store_rows(dh_ptr, row, column, d, mask, dh)
    _store_rows(df_ptr, row, column, d, mask, (scale * acting)[:, None] * df_over_step)
    if sums_ptr is not None:
        of_step = scale * tl.where(a > 0, b * slope * (cos * e - k * nu2 * a1), 0.0)
        tl.store(sums_ptr + row, lambda_l * of_step, mask=live)
        of_p = tl.zeros(row.shape, tl.float32)
        if NEED_P:
            t_over_beta = tl.where(t > 0, 1.0, tl.where(t < 0, -1.0, 0.0)) * tl.div_rn(
                tl.sqrt_rn(rho2), tl.sqrt_rn(safe_nu2)
            )
            of_p = scale * a * (cos * e * t_over_beta - sinc * beta * gx)
            if slope_ptr is None:
                of_p *= angle_exponent_slope(beta, p)
                if LOG_P:
                    of_p *= p
        tl.store(sums_ptr + n + row, of_p, mask=live)
        tl.store(sums_ptr + 2 * n + row, along, mask=live)


@triton.jit
def update_size_kernel(
    h_ptr, f_ptr, alpha_ptr, beta_ptr, n, d, h_stride, f_stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
   
):  # fmt: skip
    """beta (n,), as input of a custom angle function."""
    row, column, live, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    h = _load_rows(h_ptr, row, column, h_stride, mask)
    _, _, a, b, _, _, rho2, nu2 = measure(h, _load_rows(f_ptr, row, column, f_stride, mask))
    t, _ = relative_step(_load_scalar(alpha_ptr, row), a, b)
    tl.store(beta_ptr + row, _update_size(t, rho2, nu2), mask=live)
