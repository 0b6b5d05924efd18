"""Lion over a list of tensors in Triton (formula in csrc/include/trainwright/lion.h, driver in _optimizer.py).

Bytes per parameter: 20 in fp32; 20 for bf16 parameter and gradient with fp32 master. Bound: memory bandwidth. Not yet
timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import triton
import triton.language as tl
from trainwright.kernels._optimizer import FORMS, aot, step
from trainwright.ops.lion import OP


@triton.jit
def _scalars(h, t):
    lr, beta1, beta2 = tl.load(h), tl.load(h + 1), tl.load(h + 2)
    return 1.0 - lr * tl.load(h + 3), beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr


@triton.jit
def _update(p, g, m, s1, s2, k, SLOTS: tl.constexpr):
    keep, beta1, blend1, beta2, blend2, rate, _, _ = k
    c = beta1 * m + blend1 * g
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))  # keeps 0 and NaN
    return keep * p - rate * sign, beta2 * m + blend2 * g, s1, s2


def lion_(*arguments):  # trainwright/ops/_optimizer.py says which
    step(OP, _scalars, _update, *arguments)


AOT = aot(OP, _scalars, _update, FORMS, lost=True)
