"""AdamW over a list of tensors in Triton (formula in csrc/include/trainwright/adamw.h, driver in _optimizer.py).

Bytes per parameter: 28 in fp32; 28 for bf16 parameter and gradient with fp32 master (the parameter is only written); 26
with split16 in place of the master; 14 all in bf16; 10.1 for bf16 parameter and gradient with int8 states.
Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import triton
import triton.language as tl
from trainwright.kernels._optimizer import FORMS, aot, beta_power, step
from trainwright.kernels._state_format import div_rn, sqrt_rn
from trainwright.ops.adamw import OP


@triton.jit
def adamw_numbers(lr, beta1, beta2, eps, weight_decay, t):
    return (
        1.0 - lr * weight_decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / tl.sqrt(1.0 - beta_power(beta2, t)),
        eps,
        lr / (1.0 - beta_power(beta1, t)),
    )


@triton.jit
def _scalars(h, t):
    lr, beta1, beta2 = tl.load(h), tl.load(h + 1), tl.load(h + 2)
    return adamw_numbers(lr, beta1, beta2, tl.load(h + 3), tl.load(h + 4), t)


@triton.jit
def adamw_update(p, g, m, v, h, k, SLOTS: tl.constexpr):
    keep, blend1, beta2, blend2, inv_root2, eps, rate, _ = k
    m = m + blend1 * (g - m)
    v = beta2 * v + blend2 * (g * g)
    largest = v
    if (SLOTS >> 2) & 1:
        largest = tl.maximum(h, v, propagate_nan=tl.PropagateNan.ALL)
        h = largest
    root = sqrt_rn(largest) * inv_root2 + eps
    return keep * p - rate * div_rn(m, root), m, v, h


def adamw_(*arguments):  # trainwright/ops/_optimizer.py says which
    step(OP, _scalars, adamw_update, *arguments)


AOT = aot(OP, _scalars, adamw_update, FORMS, lost=True)
