"""SGD over a list of tensors in Triton (formula in csrc/include/trainwright/sgd.h, driver in _optimizer.py).

Bytes per parameter: 12 in fp32, 20 with momentum. Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80,
sm_90 and sm_100 without spills.
"""

import triton
import triton.language as tl
from trainwright.kernels._optimizer import FORMS, aot, step
from trainwright.ops.sgd import OP


@triton.jit
def _scalars(h, t):
    lr, momentum, dampening = tl.load(h), tl.load(h + 1), tl.load(h + 2)
    first = tl.where(t == 1.0, 1.0, 0.0).to(tl.float64)
    return tl.load(h + 3), momentum, 1.0 - dampening, lr, first, tl.load(h + 4)


@triton.jit
def _update(p, g, b, s1, s2, k, SLOTS: tl.constexpr):
    decay, momentum, gain, rate, first, nesterov, _, _ = k
    g = g + decay * p
    d = g
    if SLOTS & 1:
        b = tl.where(first != 0.0, g, momentum * b + gain * g)
        d = tl.where(nesterov != 0.0, g + momentum * b, b)
    return p - rate * d, b, s1, s2


def sgd_(*arguments):  # trainwright/ops/_optimizer.py says which
    step(OP, _scalars, _update, *arguments)


AOT = aot(OP, _scalars, _update, FORMS[1::3], lost=True)
