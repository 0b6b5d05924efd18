"""RMSprop over a list of tensors in Triton (formula in csrc/include/trainwright/rmsprop.h, driver in _optimizer.py).

Bytes per parameter: 20 in fp32, and 8 for each of momentum and centering. Bound: memory bandwidth. Not yet timed on a
GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import triton
import triton.language as tl
from trainwright.kernels._optimizer import FORMS, aot, step
from trainwright.kernels._state_format import div_rn, sqrt_rn
from trainwright.ops.rmsprop import OP


@triton.jit
def _scalars(h, t):
    alpha = tl.load(h + 1)
    return tl.load(h + 3), alpha, 1.0 - alpha, tl.load(h + 2), tl.load(h + 4), tl.load(h)


@triton.jit
def _update(p, g, v, b, a, k, SLOTS: tl.constexpr):
    decay, alpha, blend, eps, momentum, rate, _, _ = k
    g = g + decay * p
    v = alpha * v + blend * (g * g)
    variance = v
    if (SLOTS >> 2) & 1:
        a = a + blend * (g - a)
        variance = v - a * a
        variance = tl.where(variance < 0.0, variance * 0.0, variance)
    r = div_rn(g, sqrt_rn(variance) + eps)
    if (SLOTS >> 1) & 1:
        r = momentum * b + r
        b = r
    return p - rate * r, v, b, a


def rmsprop_(*arguments):  # trainwright/ops/_optimizer.py says which
    step(OP, _scalars, _update, *arguments)


AOT = aot(OP, _scalars, _update, FORMS[1::3], lost=True)
