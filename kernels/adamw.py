"""AdamW over a list of tensors in Triton (formula in csrc/include/trainwright/adamw.h).

One launch per combination of dtypes, master and AMSGrad: a program updates BLOCK elements of one tensor, whose
addresses it reads from a table (kernels/_multi_tensor.py). Hyper-parameters, step counts, gradient multiplier and skip
flag are read from device memory, so nothing waits for the host. Elements are independent: any block size gives the same
bits.
Bytes per parameter: 28 in fp32; 28 for bf16 parameter and gradient with fp32 master (the parameter is only written).
Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills.
"""

import torch
import triton
import triton.language as tl
from trainwright.kernels._cast import cast
from trainwright.kernels._multi_tensor import TL_DTYPES, block_table, number_table
from trainwright.kernels._tl import acc_type
from trainwright.ops._optimizer import unpack_spec
from trainwright.ops._optimizer_formats import FP32_MASTER, FULL_STATE, SPLIT16_MASTER

BLOCK = 2048  # 8 elements per thread of 8 warps and five streams: enough loads in flight, no spills


@triton.jit
def _adamw_kernel(
    table_ptr, blocks_ptr, hyper_ptr, control_ptr,
    P: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr, HAS_MASTER: tl.constexpr, AMSGRAD: tl.constexpr,
    HAS_CONTROL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + 9 * tl.load(blocks_ptr + 2 * program)
    n = tl.load(row + 7)
    multiplier = tl.full((), 1.0, tl.float64)
    if HAS_CONTROL:
        n = tl.where(tl.load(control_ptr + 1) == 0.0, n, 0)  # a skipped step has no elements
        multiplier = tl.load(control_ptr)
    i = tl.load(blocks_ptr + 2 * program + 1) + tl.arange(0, BLOCK)
    mask = i < n
    hyper = hyper_ptr + 6 * tl.load(row + 8)
    lr, beta1, beta2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    eps, weight_decay, maximize = tl.load(hyper + 3), tl.load(hyper + 4), tl.load(hyper + 5)
    multiplier = tl.where(maximize != 0.0, -multiplier, multiplier)
    # Bias corrections in fp64, from a step count that the launcher has already raised. 0 ** t: exp2 of -inf.
    step = tl.load(tl.load(row + 6).to(tl.pointer_type(tl.float64)))
    power1 = tl.exp2(step * tl.log2(beta1))
    power2 = tl.exp2(step * tl.log2(beta2))
    rate = lr / (1.0 - power1)
    inv_root2 = 1.0 / tl.sqrt(1.0 - power2)

    p_ptr = tl.load(row).to(tl.pointer_type(P)) + i
    m_ptr = tl.load(row + 2).to(tl.pointer_type(ACC)) + i
    v_ptr = tl.load(row + 3).to(tl.pointer_type(ACC)) + i
    master_ptr = tl.load(row + 5).to(tl.pointer_type(ACC)) + i
    g = tl.load(tl.load(row + 1).to(tl.pointer_type(G)) + i, mask=mask, other=0.0).to(ACC)
    m = tl.load(m_ptr, mask=mask, other=0.0)
    v = tl.load(v_ptr, mask=mask, other=0.0)
    if HAS_MASTER:
        p = tl.load(master_ptr, mask=mask, other=0.0)
    else:
        p = tl.load(p_ptr, mask=mask, other=0.0).to(ACC)

    g = g * multiplier.to(ACC)
    m = m + (1.0 - beta1).to(ACC) * (g - m)
    v = beta2.to(ACC) * v + (1.0 - beta2).to(ACC) * (g * g)
    h = v
    if AMSGRAD:
        h_ptr = tl.load(row + 4).to(tl.pointer_type(ACC)) + i
        h = tl.maximum(tl.load(h_ptr, mask=mask, other=0.0), v, propagate_nan=tl.PropagateNan.ALL)
        tl.store(h_ptr, h, mask=mask)
    root = tl.sqrt(h) * inv_root2.to(ACC) + eps.to(ACC)
    p = (1.0 - lr * weight_decay).to(ACC) * p - rate.to(ACC) * (m / root)

    tl.store(m_ptr, m, mask=mask)
    tl.store(v_ptr, v, mask=mask)
    if HAS_MASTER:
        tl.store(master_ptr, p, mask=mask)
    tl.store(p_ptr, cast(p, P), mask=mask)


def _in_memory_order(t):
    """t with its dims permuted so that strides fall."""
    return t.permute(sorted(range(t.dim()), key=lambda d: -t.stride(d)))


def _aligned(p, others):
    """The tensors as flat memory in one common element order. Those that do not have it are replaced by copies; a list
    of (original, copy) pairs says what to copy back."""
    if p.is_contiguous() and all(t.is_contiguous() for t in others):
        return p, others, []
    dense = _in_memory_order(p).is_contiguous()
    strides = p.stride() if dense else torch.empty(p.shape, device="meta").stride()

    def align(t):
        if t.stride() == strides:
            return t
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

    first, rest = align(p), [align(t) for t in others]
    return first, rest, [(t, c) for t, c in zip([p, *others], [first, *rest]) if c is not t]


def adamw_(
    params, grads, masters, states, steps, spec, offsets, hyper, control, seed, lost
):  # arguments: trainwright/ops/_optimizer.py
    device = params[0].device
    raise_by = torch.ones((), dtype=torch.float64, device=device)
    if control is not None:
        raise_by = (control[1] == 0).to(torch.float64)
    torch._foreach_add_(steps, raise_by)
    next_state, next_master = iter(states), iter(masters)
    groups = {}
    copies, alive = [], []
    for p, g, step, bits in zip(params, grads, steps, spec):
        kind = unpack_spec(bits)
        assert kind.master != SPLIT16_MASTER and kind.state == FULL_STATE and not kind.stochastic
        has_max, has_master = bool(kind.flags & 1), kind.master == FP32_MASTER
        state = [next(next_state) for _ in range(3 if has_max else 2)]
        state += [next(next_master)] if has_master else []
        p, (g, *state), moved = _aligned(p, [g, *state])
        copies += [pair for pair in moved if pair[1] is not g]
        alive += [p, g, *state]
        pointers = [t.data_ptr() for t in state]
        if not has_max:
            pointers.insert(2, 0)
        if not has_master:
            pointers.append(0)
        row = (p.data_ptr(), g.data_ptr(), *pointers, step.data_ptr(), p.numel(), kind.group)
        groups.setdefault((p.dtype, g.dtype, has_master, has_max), []).append(row)
    for (p_dtype, g_dtype, has_master, has_max), rows in groups.items():
        blocks = block_table(tuple(r[7] for r in rows), BLOCK, device)
        if len(blocks):
            _adamw_kernel[(len(blocks),)](
                number_table(tuple(rows), device), blocks, hyper, control,
                P=TL_DTYPES[p_dtype], G=TL_DTYPES[g_dtype],
                ACC=acc_type(p_dtype),
                HAS_MASTER=has_master, AMSGRAD=has_max, HAS_CONTROL=control is not None, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
    for original, copy in copies:
        original.copy_(copy)


_POINTERS = {
    "table_ptr": "*i64",
    "blocks_ptr": "*i64",
    "hyper_ptr": "*fp64",
    "control_ptr": "*fp64",
}
AOT = [
    (
        _adamw_kernel,
        _POINTERS,
        {"P": p, "G": g, "ACC": tl.float32, "HAS_MASTER": master, "AMSGRAD": amsgrad, "HAS_CONTROL": True,
         "BLOCK": BLOCK},
        8,
        [],
    )
    for p, g, master, amsgrad in [
        (tl.float32, tl.float32, False, False),
        (tl.bfloat16, tl.bfloat16, True, False),
        (tl.bfloat16, tl.float32, True, True),
    ]
]  # fmt: skip
