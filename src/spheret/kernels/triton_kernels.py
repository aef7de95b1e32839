"""The retraction of rows as Triton kernels: each tensor moves once in each direction.

A program holds ``BLOCK_N`` whole rows of width d in registers, padded to ``BLOCK_D`` columns with zeros. The
mathematics and its names are those of ``geometry.sphere`` and ``geometry.retraction``: ``x = h/a``, ``y = f/b``,
``z = y - c x``, ``t = step b/a``. The scales a and b are powers of two, so dividing by them rounds nothing. Row scalars
are ``(BLOCK_N,)``.

Statistics are float32, or float64 (``DTYPE``) where an input is. Every result is rounded once, when it is stored.
Eight numbers of each row are kept for the backward pass: a (0 for a row without direction), b, the two parts of c,
``|x|^2``, ``|z|^2``, ``1 - cos(theta)`` and ``sin(theta)/beta``.

``alpha_ptr``, ``p_ptr`` and ``radius_ptr`` point to one number each; without ``radius_ptr`` the norm of h is kept.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

STATS = 8
_STATS = tl.constexpr(STATS)

# pi/2 as a float32 and the rest, so that the same two numbers serve float32 and float64.
_HALF_PI = tl.constexpr(1.57079637050628662109375)
_HALF_PI_REST = tl.constexpr(-4.371139000186241e-8)
# geometry.LOG_P_RANGE
_LOG_P_MIN, _LOG_P_MAX = tl.constexpr(-3.0), tl.constexpr(5.0)


# --- arithmetic that Triton only approximates ---
#
# Triton's ``/`` and ``sqrt`` are approximate in float32, and an error to one side adds up over a thousand connections.
# Its arctan lives in a device library that the interpreter does not have.


@triton.jit
def divide(a, b):
    """a / b, rounded to nearest."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def root(a):
    """sqrt(a), rounded to nearest."""
    return tl.sqrt(a) if a.dtype == tl.float64 else tl.sqrt_rn(a)


@triton.jit
def tiny(like):
    """Smallest normal number of a tensor's dtype."""
    return 2.2250738585072014e-308 if like.dtype == tl.float64 else 1.1754943508222875e-38


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
    return tl.where(u > 1, _HALF_PI - (acute - _HALF_PI_REST), acute)


@triton.jit
def _power_of_two(largest):
    """A positive number rounded down to a power of two, within the range whose reciprocal is normal too."""
    if largest.dtype == tl.float64:
        power = (largest.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
        power = tl.minimum(tl.maximum(power, 2.2250738585072014e-308), 4.49423283715579e307)
    else:
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.minimum(tl.maximum(power, 1.1754943508222875e-38), 8.507059173023462e37)
    return power


@triton.jit
def _reciprocal(power):
    """1 over a power of two, exactly, by its exponent bits."""
    if power.dtype == tl.float64:
        result = (0x7FE0000000000000 - power.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
    else:
        result = (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return result


# --- the angle: theta = p arctan(beta / p), one formula for every p in (0, inf], so all p cost the same ---


@triton.jit
def rotation(beta, p):
    """``(1 - cos theta, sin(theta) / beta)``; at p = inf theta is beta.

    Both from the half angle, so that the versine keeps its digits where the angle is small and the two stay on one
    circle. Beyond ``beta = p`` whole quarter turns of ``theta/2 = p/2 (pi/2 - arctan(p/beta))`` are split off before
    anything is rounded, so that the sine keeps its digits near pi too (p = 2 and a large step).
    """
    u = divide(beta, p)
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
    smallest = 1e-150 if beta.dtype == tl.float64 else 1e-18
    return 2 * sin * sin, tl.where(beta > smallest, divide(2 * sin * cos, tl.maximum(beta, smallest)), 1.0)


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


# --- rows in registers ---


@triton.jit
def _grid(n, d, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row numbers (BLOCK_N,) in 64 bits, since their offsets pass 2^31; columns (1, BLOCK_D); the masks of both."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)[None, :]
    live = row < n
    return row, column, live, live[:, None] & (column < d)


@triton.jit
def _load_rows(rows_ptr, row, column, stride, mask, DTYPE: tl.constexpr):
    return tl.load(rows_ptr + row[:, None] * stride + column, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _store_rows(rows_ptr, row, column, d, mask, values):
    if rows_ptr.dtype.element_ty.primitive_bitwidth < 32:
        values = values.to(tl.float32)  # not every way leads from float64 to 16 bits
    tl.store(rows_ptr + row[:, None] * d + column, values, mask=mask)


@triton.jit
def _load_scalar(scalar_ptr, row, DTYPE: tl.constexpr):
    """One number, for every row."""
    return tl.full(row.shape, 1.0, DTYPE) * tl.load(scalar_ptr).to(DTYPE)


@triton.jit
def _load_exponent(p_ptr, row, LOG_P: tl.constexpr, DTYPE: tl.constexpr):
    p = _load_scalar(p_ptr, row, DTYPE)
    if LOG_P:
        p = tl.exp(tl.where(p < _LOG_P_MIN, _LOG_P_MIN, tl.where(p > _LOG_P_MAX, _LOG_P_MAX, p)))  # NaN stays
    return p


@triton.jit
def measure(h, f):
    """x and z (BLOCK_N, BLOCK_D) and the first six statistics of rows h and f."""
    largest_h, largest_f = tl.max(tl.abs(h), 1), tl.max(tl.abs(f), 1)
    a = _power_of_two(largest_h)
    b = tl.where(largest_f > tiny(f), _power_of_two(largest_f), a)
    x, y = h * _reciprocal(a)[:, None], f * _reciprocal(b)[:, None]
    xx = tl.sum(x * x, 1)
    rho2 = tl.where(xx < 1, 1.0, xx)
    c1 = divide(tl.sum(x * y, 1), rho2)
    z = y - c1[:, None] * x
    # Second Gram-Schmidt step: where f is parallel to h, z is noise, and noise is partly radial.
    c2 = divide(tl.sum(x * z, 1), rho2)
    z = z - c2[:, None] * x
    a = tl.where(largest_h > tiny(h), a, 0.0)
    return x, z, a, b, c1, c2, rho2, tl.sum(z * z, 1)


@triton.jit
def _scale(h, f, a, b, c1, c2):
    """x and z of rows whose statistics are known, by the operations of `measure`."""
    x = h * _reciprocal(tl.maximum(a, tiny(a)))[:, None]
    y = f * _reciprocal(b)[:, None]
    return x, (y - c1[:, None] * x) - c2[:, None] * x


@triton.jit
def relative_step(step, a, b):
    """``t``, bounded where its square would overflow, and the step that acts then; both 0 for a row without
    direction."""
    largest = 1e150 if a.dtype == tl.float64 else 1e16
    finite = 1.7e308 if a.dtype == tl.float64 else 3.4e38
    safe = tl.maximum(a, tiny(a))
    t = step * tl.minimum(b * _reciprocal(safe), finite)
    bound = tl.where(t > largest, largest, tl.where(t < -largest, -largest, t))  # NaN stays
    acting = tl.where(bound == t, step, bound * (safe * _reciprocal(b)))
    return tl.where(a > 0, bound, 0.0), tl.where(a > 0, acting, 0.0)


@triton.jit
def _update_size(t, rho2, nu2):
    """beta = ``|w| / |h|``."""
    return tl.abs(t) * root(divide(nu2, rho2))


# --- kernels ---


@triton.jit
def retract_kernel(
    h_ptr,
    f_ptr,
    alpha_ptr,
    p_ptr,
    radius_ptr,
    theta_ptr,
    out_ptr,
    branch_ptr,
    stats_ptr,
    lambda_l,
    n,
    d,
    h_stride,
    f_stride,
    LOG_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """out, its copy for the branch (or None) in another dtype, and stats (n, 8), from h and f. ``theta_ptr`` (n,),
    unless None, holds angles that take the place of those of p."""
    row, column, live, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    h = _load_rows(h_ptr, row, column, h_stride, mask, DTYPE)
    x, z, a, b, c1, c2, rho2, nu2 = measure(h, _load_rows(f_ptr, row, column, f_stride, mask, DTYPE))
    t, _ = relative_step(_load_scalar(alpha_ptr, row, DTYPE) * lambda_l, a, b)
    beta = _update_size(t, rho2, nu2)
    if theta_ptr is None:
        versine, sinc = rotation(beta, _load_exponent(p_ptr, row, LOG_P, DTYPE))
    else:
        half = 0.5 * tl.load(theta_ptr + row, mask=live, other=0.0).to(DTYPE)
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
    factor = tl.maximum(a, tiny(a))
    if radius_ptr is not None:
        factor = divide(_load_scalar(radius_ptr, row, DTYPE), root(rho2))
    # h plus what changes, not C h: a cosine that rounds to 1 would let the norm grow.
    moved = factor[:, None] * (x + ((sinc * t)[:, None] * z - versine[:, None] * x))
    _store_rows(out_ptr, row, column, d, mask, moved)
    if branch_ptr is not None:
        _store_rows(branch_ptr, row, column, d, mask, moved)


@triton.jit
def retract_backward_kernel(
    g_ptr,
    g_branch_ptr,
    h_ptr,
    f_ptr,
    stats_ptr,
    alpha_ptr,
    p_ptr,
    radius_ptr,
    slope_ptr,
    dh_ptr,
    df_ptr,
    sums_ptr,
    lambda_l,
    n,
    d,
    g_stride,
    g_branch_stride,
    h_stride,
    f_stride,
    LOG_P: tl.constexpr,
    NEED_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gradients by the formulas of ``geometry.retract_vjp``, for the sum of g and, unless None, g_branch.

    ``sums_ptr`` (3, n) gets the gradients of alpha, p (0 unless NEED_P) and radius, row by row. With ``slope_ptr``
    (n,) the angle is a function of its own with these slopes, and the second row holds the gradients of theta.
    """
    row, column, live, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    at = stats_ptr + row * _STATS
    a, b = tl.load(at, mask=live, other=0.0), tl.load(at + 1, mask=live, other=1.0)
    c1, c2 = tl.load(at + 2, mask=live, other=0.0), tl.load(at + 3, mask=live, other=0.0)
    rho2, nu2 = tl.load(at + 4, mask=live, other=1.0), tl.load(at + 5, mask=live, other=0.0)
    versine, sinc = tl.load(at + 6, mask=live, other=0.0), tl.load(at + 7, mask=live, other=1.0)
    h = _load_rows(h_ptr, row, column, h_stride, mask, DTYPE)
    x, z = _scale(h, _load_rows(f_ptr, row, column, f_stride, mask, DTYPE), a, b, c1, c2)
    g = _load_rows(g_ptr, row, column, g_stride, mask, DTYPE)
    if g_branch_ptr is not None:
        g += _load_rows(g_branch_ptr, row, column, g_branch_stride, mask, DTYPE)
    t, acting = relative_step(_load_scalar(alpha_ptr, row, DTYPE) * lambda_l, a, b)
    beta = _update_size(t, rho2, nu2)
    p = _load_exponent(p_ptr, row, LOG_P, DTYPE)
    slope = angle_slope(beta, p)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + row, mask=live, other=1.0).to(DTYPE)
    cos, k = 1 - versine, sinc * t
    gx, e = tl.sum(g * x, 1), tl.sum(g * z, 1)
    a1, safe_nu2 = divide(gx, rho2), tl.maximum(nu2, tiny(nu2))
    m = (slope * cos - sinc) * divide(e, safe_nu2) - slope * k * a1
    df_over_step = sinc[:, None] * g - (sinc * a1)[:, None] * x + m[:, None] * z
    dh = cos[:, None] * g - ((c1 + c2) * t)[:, None] * df_over_step
    dh = dh - (k * a1)[:, None] * z - (t * m * divide(nu2, rho2))[:, None] * x
    scale = tl.full(row.shape, 1.0, DTYPE)
    along = divide(cos * gx + k * e, root(rho2))  # <g, h'> / radius
    if radius_ptr is not None:
        radius = _load_scalar(radius_ptr, row, DTYPE)
        scale = tl.where(a > 0, divide(radius, tl.maximum(a, tiny(a)) * root(rho2)), 0.0)
        dh = scale[:, None] * dh - divide(scale * along, root(rho2))[:, None] * x
    _store_rows(dh_ptr, row, column, d, mask, dh)
    _store_rows(df_ptr, row, column, d, mask, (scale * acting)[:, None] * df_over_step)
    if sums_ptr is not None:
        of_step = scale * tl.where(a > 0, b * slope * (cos * e - k * nu2 * a1), 0.0)
        tl.store(sums_ptr + row, lambda_l * of_step, mask=live)
        of_p = tl.zeros(row.shape, DTYPE)
        if NEED_P:
            t_over_beta = tl.where(t > 0, 1.0, tl.where(t < 0, -1.0, 0.0)) * divide(root(rho2), root(safe_nu2))
            of_p = scale * a * (cos * e * t_over_beta - sinc * beta * gx)
            if slope_ptr is None:
                of_p *= angle_exponent_slope(beta, p)
                if LOG_P:
                    of_p *= p
        tl.store(sums_ptr + n + row, of_p, mask=live)
        tl.store(sums_ptr + 2 * n + row, along, mask=live)


@triton.jit
def update_size_kernel(
    h_ptr,
    f_ptr,
    alpha_ptr,
    beta_ptr,
    n,
    d,
    h_stride,
    f_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """beta (n,), for an angle that is computed elsewhere."""
    row, column, live, mask = _grid(n, d, BLOCK_N, BLOCK_D)
    h = _load_rows(h_ptr, row, column, h_stride, mask, DTYPE)
    _, _, a, b, _, _, rho2, nu2 = measure(h, _load_rows(f_ptr, row, column, f_stride, mask, DTYPE))
    t, _ = relative_step(_load_scalar(alpha_ptr, row, DTYPE), a, b)
    tl.store(beta_ptr + row, _update_size(t, rho2, nu2), mask=live)
