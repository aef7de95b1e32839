"""The retraction of rows as Triton kernels: each tensor moves once in each direction.

A program holds ``ROWS`` whole rows of width d in registers, padded to ``BLOCK`` columns. The mathematics and its names
are those of ``geometry.sphere`` and ``geometry.retraction``. Statistics are float32, or float64 (``T``) where an input
is; every result is rounded once, when it is stored.

Eight numbers per row are kept for the backward: a (0 for a row without direction), b, the two parts of c, |x|^2,
|z|^2, ``1 - cos theta`` and ``sin(theta)/beta``. ``step``, ``p`` and ``radius`` are numbers (``*_STRIDE`` is None), or
pointers to one number (0) or one per row (1); a radius of None keeps the norm of h.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from spheret.kernels.triton_geometry import relative_size, relative_step, scaled_again, statistics, tiny
from spheret.kernels.triton_scalars import angle_exponent_slope, angle_slope, divide, root, rotation

STATS = 8
_STATS = tl.constexpr(STATS)


# --- reading and writing ---


@triton.jit
def _grid(n, d, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Row numbers (ROWS,) in 64 bits, since their offsets pass 2^31; column numbers (1, BLOCK); both masks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = row < n
    return row, column, live, live[:, None] & (column < d)


@triton.jit
def _load_rows(rows, row, column, stride, mask, T: tl.constexpr):
    return tl.load(rows + row[:, None] * stride + column, mask=mask, other=0.0).to(T)


@triton.jit
def _store_rows(rows, row, column, d, mask, values):
    if rows.dtype.element_ty.primitive_bitwidth < 32:
        values = values.to(tl.float32)  # not every way leads from float64 to 16 bits
    tl.store(rows + row[:, None] * d + column, values, mask=mask)


@triton.jit
def _per_row(value, STRIDE: tl.constexpr, row, live, T: tl.constexpr):
    """A scalar argument as one number per row."""
    if STRIDE is None:
        result = tl.full(row.shape, value, T)
    else:
        result = tl.load(value + row * STRIDE, mask=live, other=1.0).to(T)
    return result


@triton.jit
def _load_stats(stats, row, live):
    at = stats + row * _STATS
    a = tl.load(at, mask=live, other=0.0)
    b = tl.load(at + 1, mask=live, other=1.0)
    c1, c2 = tl.load(at + 2, mask=live, other=0.0), tl.load(at + 3, mask=live, other=0.0)
    rho2, nu2 = tl.load(at + 4, mask=live, other=1.0), tl.load(at + 5, mask=live, other=0.0)
    versine, sinc = tl.load(at + 6, mask=live, other=0.0), tl.load(at + 7, mask=live, other=1.0)
    return a, b, c1, c2, rho2, nu2, versine, sinc


@triton.jit
def _store_stats(stats, row, live, a, b, c1, c2, rho2, nu2):
    at = stats + row * _STATS
    tl.store(at, a, mask=live)
    tl.store(at + 1, b, mask=live)
    tl.store(at + 2, c1, mask=live)
    tl.store(at + 3, c2, mask=live)
    tl.store(at + 4, rho2, mask=live)
    tl.store(at + 5, nu2, mask=live)


@triton.jit
def _store_rotation(stats, row, live, versine, sinc):
    tl.store(stats + row * _STATS + 6, versine, mask=live)
    tl.store(stats + row * _STATS + 7, sinc, mask=live)


@triton.jit
def _write_forward(
    x,
    z,
    a,
    t,
    rho2,
    versine,
    sinc,
    radius,
    RADIUS_STRIDE: tl.constexpr,
    out,
    branch,
    row,
    column,
    d,
    live,
    mask,
    T: tl.constexpr,
):
    """``C h + S w``, times ``radius / |h|`` where a radius is given, into one tensor or two."""
    factor = tl.maximum(a, tiny(a))
    if radius is not None:
        factor = divide(_per_row(radius, RADIUS_STRIDE, row, live, T), root(rho2))
    # h plus what changes, not C h: a cosine that rounds to 1 would let the norm grow.
    moved = factor[:, None] * (x + ((sinc * t)[:, None] * z - versine[:, None] * x))
    _store_rows(out, row, column, d, mask, moved)
    if branch is not None:
        _store_rows(branch, row, column, d, mask, moved)


# --- kernels ---


@triton.jit
def forward_kernel(
    h,
    f,
    step,
    p,
    radius,
    out,
    branch,
    stats,
    n,
    d,
    h_stride,
    f_stride,
    STEP_STRIDE: tl.constexpr,
    P_STRIDE: tl.constexpr,
    RADIUS_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    """out, its copy ``branch`` (or None) in another dtype, and stats, from h and f."""
    row, column, live, mask = _grid(n, d, ROWS, BLOCK)
    x, z, a, b, c1, c2, rho2, nu2 = statistics(
        _load_rows(h, row, column, h_stride, mask, T), _load_rows(f, row, column, f_stride, mask, T)
    )
    t, _ = relative_step(_per_row(step, STEP_STRIDE, row, live, T), a, b)
    beta = relative_size(t, rho2, nu2)
    versine, sinc = rotation(beta, _per_row(p, P_STRIDE, row, live, T))
    _store_stats(stats, row, live, a, b, c1, c2, rho2, nu2)
    _store_rotation(stats, row, live, versine, sinc)
    _write_forward(x, z, a, t, rho2, versine, sinc, radius, RADIUS_STRIDE, out, branch, row, column, d, live, mask, T)


@triton.jit
def dots_kernel(
    h,
    f,
    step,
    stats,
    beta,
    n,
    d,
    h_stride,
    f_stride,
    STEP_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    """The first six statistics, and beta (rows,), for an angle that is computed elsewhere."""
    row, column, live, mask = _grid(n, d, ROWS, BLOCK)
    _, _, a, b, c1, c2, rho2, nu2 = statistics(
        _load_rows(h, row, column, h_stride, mask, T), _load_rows(f, row, column, f_stride, mask, T)
    )
    t, _ = relative_step(_per_row(step, STEP_STRIDE, row, live, T), a, b)
    _store_stats(stats, row, live, a, b, c1, c2, rho2, nu2)
    tl.store(beta + row, relative_size(t, rho2, nu2), mask=live)


@triton.jit
def combine_kernel(
    h,
    f,
    step,
    radius,
    out,
    branch,
    stats,
    n,
    d,
    h_stride,
    f_stride,
    STEP_STRIDE: tl.constexpr,
    RADIUS_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    """out and branch from statistics that are complete."""
    row, column, live, mask = _grid(n, d, ROWS, BLOCK)
    a, b, c1, c2, rho2, _, versine, sinc = _load_stats(stats, row, live)
    x, z = scaled_again(
        _load_rows(h, row, column, h_stride, mask, T), _load_rows(f, row, column, f_stride, mask, T), a, b, c1, c2
    )
    t, _ = relative_step(_per_row(step, STEP_STRIDE, row, live, T), a, b)
    _write_forward(x, z, a, t, rho2, versine, sinc, radius, RADIUS_STRIDE, out, branch, row, column, d, live, mask, T)


@triton.jit
def backward_kernel(
    g,
    branch_g,
    h,
    f,
    stats,
    step,
    p,
    radius,
    kappa,
    dh,
    df,
    sums,
    n,
    d,
    g_stride,
    branch_g_stride,
    h_stride,
    f_stride,
    STEP_STRIDE: tl.constexpr,
    P_STRIDE: tl.constexpr,
    RADIUS_STRIDE: tl.constexpr,
    NEED_P: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    """Gradients by the formulas of ``geometry.retract_vjp``; ``sums`` (3, rows), or None, gets those of step, p and
    radius row by row. Where ``kappa`` (rows,) is given, the angle is a function of its own, and the second of them is
    that of the angle itself."""
    row, column, live, mask = _grid(n, d, ROWS, BLOCK)
    a, b, c1, c2, rho2, nu2, versine, sinc = _load_stats(stats, row, live)
    x, z = scaled_again(
        _load_rows(h, row, column, h_stride, mask, T), _load_rows(f, row, column, f_stride, mask, T), a, b, c1, c2
    )
    up = _load_rows(g, row, column, g_stride, mask, T)
    if branch_g is not None:
        up += _load_rows(branch_g, row, column, branch_g_stride, mask, T)
    t, acting = relative_step(_per_row(step, STEP_STRIDE, row, live, T), a, b)
    beta = relative_size(t, rho2, nu2)
    if kappa is None:
        exponent = _per_row(p, P_STRIDE, row, live, T)
        slope = angle_slope(beta, exponent)
    else:
        slope = tl.load(kappa + row, mask=live, other=1.0)
    cos, k = 1 - versine, sinc * t
    gx, e = tl.sum(up * x, 1), tl.sum(up * z, 1)
    a1, safe_nu2 = divide(gx, rho2), tl.maximum(nu2, tiny(nu2))
    m = (slope * cos - sinc) * divide(e, safe_nu2) - slope * k * a1
    over_s = sinc[:, None] * up - (sinc * a1)[:, None] * x + m[:, None] * z  # df / s
    to_h = cos[:, None] * up - ((c1 + c2) * t)[:, None] * over_s
    to_h = to_h - (k * a1)[:, None] * z - (t * m * divide(nu2, rho2))[:, None] * x
    scale = tl.full(row.shape, 1.0, T)
    along = divide(cos * gx + k * e, root(rho2))  # <g, h'> / radius
    if radius is not None:
        r = _per_row(radius, RADIUS_STRIDE, row, live, T)
        scale = tl.where(a > 0, divide(r, tl.maximum(a, tiny(a)) * root(rho2)), 0.0)
        to_h = scale[:, None] * to_h - divide(scale * along, root(rho2))[:, None] * x
    _store_rows(dh, row, column, d, mask, to_h)
    _store_rows(df, row, column, d, mask, (scale * acting)[:, None] * over_s)
    if sums is not None:
        tl.store(sums + row, scale * tl.where(a > 0, b * slope * (cos * e - k * nu2 * a1), 0.0), mask=live)
        dp = tl.zeros(row.shape, T)
        if NEED_P:
            # t / beta
            turn = tl.where(t > 0, 1.0, tl.where(t < 0, -1.0, 0.0)) * divide(root(rho2), root(safe_nu2))
            dp = scale * a * (cos * e * turn - sinc * beta * gx)
            if kappa is None:
                dp *= angle_exponent_slope(beta, exponent)
        tl.store(sums + n + row, dp, mask=live)
        tl.store(sums + 2 * n + row, along, mask=live)
