"""The activations of trainwright/activation.h in Triton: value and slope, by the same numbers."""

import triton
import triton.language as tl


@triton.jit
def _twice_u(z):
    # (1 + tanh u) / 2 = sigmoid(2u), u = sqrt(2/pi) (z + 0.044715 z^3)
    return z * (1.5957691216057308 + 0.07135481282745166 * z * z)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        z = tl.where(z < 0, 0.0, z)  # NaN stays
    elif ACTIVATION == 2:
        z = z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == 3:
        z = z * tl.sigmoid(_twice_u(z))
    elif ACTIVATION == 4:
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def activation_slope(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        slope = tl.where(z <= 0, 0.0, z * 0 + 1.0)
    elif ACTIVATION == 2:
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        slope = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476) + z * density
    elif ACTIVATION == 3:
        # sigmoid(-t) is 1 - sigmoid(t) with all its digits.
        t = _twice_u(z)
        s = tl.sigmoid(t)
        slope = s + z * s * tl.sigmoid(-t) * (1.5957691216057308 + 0.21406443848235497 * z * z)
        slope = tl.where(z * z > 900, tl.where(z > 0, 1.0, 0.0), slope)  # inf * 0 far out
    else:
        s = tl.sigmoid(z)
        slope = s + z * s * tl.sigmoid(-z)
    return slope
