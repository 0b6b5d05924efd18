"""The two passes of Muon over a list of tensors in Triton (formulas in csrc/include/trainwright/muon.h, driver in
_optimizer.py); its matrix products are kernels/newton_schulz.py.

Bytes per parameter, fp32 parameter and gradient, bf16 update: momentum 14 (gradient, buffer read and written, update
written), update 10. Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without
spills.
"""

import triton
import triton.language as tl
from trainwright.kernels._optimizer import FORMS, aot, step
from trainwright.ops.muon import MOMENTUM, UPDATE


@triton.jit
def _towards(b, g, momentum, blend):
    return tl.where(blend < 0.5, b + blend * (g - b), g - momentum * (g - b))


@triton.jit
def _momentum_scalars(h, t):
    return tl.load(h), 1.0 - tl.load(h), tl.load(h + 1)


@triton.jit
def _momentum(p, g, b, s1, s2, k, SLOTS: tl.constexpr):
    """p is what the pass writes, the update."""
    momentum, blend, nesterov, _, _, _, _, _ = k
    b = _towards(b, g, momentum, blend)
    return tl.where(nesterov != 0.0, _towards(b, g, momentum, blend), b), b, s1, s2


@triton.jit
def _update_scalars(h, t):
    lr = tl.load(h)
    return 1.0 - lr * tl.load(h + 1), lr * tl.load(h + 2)


@triton.jit
def _update(p, o, s0, s1, s2, k, SLOTS: tl.constexpr):
    return k[0] * p - k[1] * o, s0, s1, s2


def muon_momentum_(*arguments):  # trainwright/ops/_optimizer.py says which
    step(MOMENTUM, _momentum_scalars, _momentum, *arguments)


def muon_update_(*arguments):
    step(UPDATE, _update_scalars, _update, *arguments)


AOT = [
    *aot(MOMENTUM, _momentum_scalars, _momentum, FORMS),
    *aot(UPDATE, _update_scalars, _update, FORMS[:3]),
]
