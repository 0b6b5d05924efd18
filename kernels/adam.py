"""Adam over a list of tensors in Triton (formula in csrc/include/trainwright/adam.h, driver in _optimizer.py).

Bytes per parameter: those of AdamW (adamw.py). Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80,
sm_90 and sm_100 without spills.
"""

import triton
import triton.language as tl
from trainwright.kernels._optimizer import FORMS, aot, step
from trainwright.kernels.adamw import adamw_numbers, adamw_update
from trainwright.ops.adam import OP


@triton.jit
def _scalars(h, t):
    lr, beta1, beta2, eps = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
    decay, decoupled = tl.load(h + 4), tl.load(h + 5)
    keep, blend1, beta2, blend2, inv_root2, eps, rate = adamw_numbers(
        lr, beta1, beta2, eps, decay * decoupled, t
    )
    return keep, blend1, beta2, blend2, inv_root2, eps, rate, decay * (1.0 - decoupled)


@triton.jit
def _update(p, g, m, v, h, k, SLOTS: tl.constexpr):
    return adamw_update(p, g + k[7] * p, m, v, h, k, SLOTS)


def adam_(*arguments):  # trainwright/ops/_optimizer.py says which
    step(OP, _scalars, _update, *arguments)


AOT = aot(OP, _scalars, _update, FORMS[1::3], lost=True)
