"""LAMB over a list of tensors in Triton (formula in csrc/include/trainwright/lamb.h, driver in _optimizer.py).

Two passes of the driver: the first stores the states and, for each chunk, the squares of the parameter and of the
update's direction in fp64; between them one program for each tensor adds those up, in a fixed order, and writes the
tensor's learning rate; the second pass computes the direction again from the states as they are stored.
Bytes per parameter in fp32: 16 + 8 in the first pass, 12 + 4 in the second: 40 (counted: 40.01). Bound: memory
bandwidth. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import itertools

import torch
import triton
import triton.language as tl
from trainwright.kernels import _optimizer as driver
from trainwright.kernels._multi_tensor import number_table
from trainwright.kernels._state_format import div_rn, sqrt_rn
from trainwright.ops._optimizer import unpack_spec
from trainwright.ops.lamb import OP

PARTIALS = 1024  # added by a program at a time
CHUNK = 32 * driver.TILE  # a program's at least: a tensor's sums are few


@triton.jit
def _scalars(h, t):
    lr, beta1, beta2 = tl.load(h), tl.load(h + 1), tl.load(h + 2)
    return (
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / tl.sqrt(1.0 - driver.beta_power(beta2, t)),
        tl.load(h + 3),
        1.0 / (1.0 - driver.beta_power(beta1, t)),
        tl.load(h + 4),
        lr,
    )


@triton.jit
def _moments(p, g, m, v, s2, k, SLOTS: tl.constexpr):
    return p, m + k[0] * (g - m), k[1] * v + k[2] * (g * g), s2


@triton.jit
def _direction(p, m, v, k):
    _, _, _, inv_root2, eps, unbias1, decay, _ = k
    return div_rn(m * unbias1, sqrt_rn(v) * inv_root2 + eps) + decay * p


@triton.jit
def _apply(p, g, m, v, s2, k, SLOTS: tl.constexpr):
    return p - k[7] * _direction(p, m, v, k), m, v, s2


@triton.jit
def _rate_kernel(norms_ptr, spans_ptr, rate_ptr, PARTIALS: tl.constexpr):
    """spans_ptr: for each tensor its first pair of squares, their number, and where its learning rate is."""
    span = spans_ptr + 3 * tl.program_id(0)
    first, count = tl.load(span), tl.load(span + 1)
    p_squares = tl.zeros((PARTIALS,), tl.float64)
    u_squares = tl.zeros((PARTIALS,), tl.float64)
    for begin in range(0, count, PARTIALS):
        j = begin + tl.arange(0, PARTIALS)
        pair = norms_ptr + 2 * (first + j)
        p_squares += tl.load(pair, mask=j < count, other=0.0)
        u_squares += tl.load(pair + 1, mask=j < count, other=0.0)
    p_norm, u_norm = tl.sqrt(tl.sum(p_squares)), tl.sqrt(tl.sum(u_squares))
    ratio = tl.where((p_norm == 0.0) | (u_norm == 0.0), 1.0, p_norm / u_norm)
    rate_ptr += tl.load(span + 2)
    tl.store(rate_ptr, tl.load(rate_ptr) * ratio)


def lamb_(
    params, grads, masters, states, steps, spec, offsets, hyper, control, seed, lost
):  # arguments: trainwright/ops/_optimizer.py
    specs = [unpack_spec(s) for s in spec]
    k = driver.prepare(OP, _scalars, steps, specs, hyper, control)
    work = driver.collect(OP, params, grads, masters, states, specs, offsets)
    rate = k.shape[1] - 1
    for form, rows in work.rows.items():
        # By its own size alone, so that a norm does not depend on the other tensors.
        chunks = [max(CHUNK, driver.chunk_of(row[0], form)) for row in rows]
        counts = [triton.cdiv(row[0], chunk) for row, chunk in zip(rows, chunks)]
        norms = torch.empty((sum(counts), 2), dtype=torch.float64, device=k.device)
        ends = itertools.accumulate(counts)
        spans = [
            (end - n, n, row[2] * k.shape[1] + rate) for end, n, row in zip(ends, counts, rows)
        ]
        driver.launch(
            OP, form, rows, chunks, k, control, None, seed, _moments,
            direction=_direction, norms=norms, do=driver.STATES,
        )  # fmt: skip
        _rate_kernel[(len(rows),)](
            norms, number_table(tuple(spans), k.device), k, PARTIALS=PARTIALS, **driver.OPTIONS
        )
        driver.launch(OP, form, rows, chunks, k, control, lost, seed, _apply, do=driver.PARAMETER)
    work.write_back()


AOT = [
    *driver.aot(OP, _scalars, _moments, driver.FORMS[::3], do=driver.STATES, direction=_direction),
    *driver.aot(OP, _scalars, _apply, driver.FORMS[::3], do=driver.PARAMETER, lost=True),
    (
        _rate_kernel,
        {"norms_ptr": "*fp64", "spans_ptr": "*i64", "rate_ptr": "*fp64"},
        {"PARTIALS": PARTIALS},
        driver.WARPS,
        [],
        {"enable_fp_fusion": False},
    ),
]
