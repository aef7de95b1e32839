"""Row geometry inside a Triton kernel: what ``geometry.sphere`` makes of ``h`` and ``f``, of rows in registers.

The names are the same: ``x = h/a``, ``y = f/b``, ``z = y - c x``, ``t = step b/a``. The scales a and b are powers of
two, so that dividing by them rounds nothing. Rows are (ROWS, BLOCK), padded with zeros; their scalars are (ROWS,).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from spheret.kernels.triton_scalars import divide, root


@triton.jit
def tiny(like):
    """Smallest normal number of a tensor's dtype."""
    return 2.2250738585072014e-308 if like.dtype == tl.float64 else 1.1754943508222875e-38


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


@triton.jit
def statistics(h, f):
    """x and z (ROWS, BLOCK) and the first six statistics of rows h and f."""
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
def scaled_again(h, f, a, b, c1, c2):
    """x and z from statistics that are known, by the operations that made them."""
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
def relative_size(t, rho2, nu2):
    """``|w| / |h|``."""
    return tl.abs(t) * root(divide(nu2, rho2))
