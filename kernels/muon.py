"""The two passes of Muon over a list of tensors in Triton (formulas in csrc/include/trainwright/muon.h); its matrix
products are kernels/newton_schulz.py.

One launch per mix of dtypes, one program per block of elements of any tensor (kernels/_multi_tensor.py). Tensors that
are not contiguous pass through a copy. No fused multiply-add, so that the bits are those of the other backends.
Bytes per parameter, fp32 parameter and gradient, bf16 update: momentum 14 (gradient, buffer read and written, update
written), update 10. Bound: memory bandwidth. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without
spills.
"""

import functools

import torch
import triton
import triton.language as tl
from trainwright.kernels._cast import cast
from trainwright.kernels._multi_tensor import TL_DTYPES, block_table, number_table
from trainwright.kernels._tl import acc_type

BLOCK = 2048  # 8 elements per thread of 8 warps
OPTIONS = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _towards(b, g, momentum, blend):
    return tl.where(blend < 0.5, b + blend * (g - b), g - momentum * (g - b))


@triton.jit
def _momentum_kernel(
    table_ptr, blocks_ptr, hyper_ptr, control_ptr,
    G: tl.constexpr, B: tl.constexpr, U: tl.constexpr, ACC: tl.constexpr, HAS_CONTROL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + 5 * tl.load(blocks_ptr + 2 * program)
    i = tl.load(blocks_ptr + 2 * program + 1) + tl.arange(0, BLOCK)
    n = tl.load(row + 3)
    mask = i < n
    hyper = hyper_ptr + 4 * tl.load(row + 4)
    mu, nesterov = tl.load(hyper + 2), tl.load(hyper + 3)
    momentum, blend = mu.to(ACC), (1.0 - mu).to(ACC)
    b_ptr = tl.load(row + 1).to(tl.pointer_type(B)) + i
    g = tl.load(tl.load(row).to(tl.pointer_type(G)) + i, mask=mask, other=0.0).to(ACC)
    b = tl.load(b_ptr, mask=mask, other=0.0).to(ACC)
    if HAS_CONTROL:
        g = g * tl.load(control_ptr).to(ACC)
    b = _towards(b, g, momentum, blend)
    u = tl.where(nesterov != 0.0, _towards(b, g, momentum, blend), b)
    keep = mask
    if HAS_CONTROL:  # a skipped step: nothing is remembered, and the update is 0
        keep = i < tl.where(tl.load(control_ptr + 1) == 0.0, n, 0)
        u = tl.where(keep, u, 0.0)
    tl.store(b_ptr, cast(b, B), mask=keep)
    tl.store(tl.load(row + 2).to(tl.pointer_type(U)) + i, cast(u, U), mask=mask)


@triton.jit
def _update_kernel(
    table_ptr, blocks_ptr, ratios_ptr, hyper_ptr, control_ptr,
    P: tl.constexpr, U: tl.constexpr, ACC: tl.constexpr, HAS_MASTER: tl.constexpr, HAS_CONTROL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(blocks_ptr + 2 * program)
    row = table_ptr + 5 * number
    n = tl.load(row + 3)
    if HAS_CONTROL:
        n = tl.where(tl.load(control_ptr + 1) == 0.0, n, 0)  # a skipped step has no elements
    i = tl.load(blocks_ptr + 2 * program + 1) + tl.arange(0, BLOCK)
    mask = i < n
    hyper = hyper_ptr + 4 * tl.load(row + 4)
    lr, weight_decay = tl.load(hyper), tl.load(hyper + 1)
    p_ptr = tl.load(row).to(tl.pointer_type(P)) + i
    master_ptr = tl.load(row + 1).to(tl.pointer_type(ACC)) + i
    if HAS_MASTER:
        p = tl.load(master_ptr, mask=mask, other=0.0)
    else:
        p = tl.load(p_ptr, mask=mask, other=0.0).to(ACC)
    u = tl.load(tl.load(row + 2).to(tl.pointer_type(U)) + i, mask=mask, other=0.0).to(ACC)
    rate = lr * tl.load(ratios_ptr + number)
    p = (1.0 - lr * weight_decay).to(ACC) * p - rate.to(ACC) * u
    if HAS_MASTER:
        tl.store(master_ptr, p, mask=mask)
    tl.store(p_ptr, cast(p, P), mask=mask)


@functools.lru_cache(maxsize=256)
def _numbers(values, device):
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


class _Contiguous:
    """Contiguous stand-ins for tensors; `write_back` copies those that were written into their originals."""

    def __init__(self):
        self.pairs = []
        self.alive = []

    def __call__(self, t, written):
        dense = t.contiguous()
        self.alive.append(dense)
        if written and dense is not t:
            self.pairs.append((t, dense))
        return dense.data_ptr()

    def write_back(self):
        for original, dense in self.pairs:
            original.copy_(dense)


def muon_momentum_(grads, buffers, updates, groups, hyper, control):
    dense, batches = _Contiguous(), {}
    for g, b, u, group in zip(grads, buffers, updates, groups):
        row = (dense(g, False), dense(b, True), dense(u, True), b.numel(), group)
        batches.setdefault((g.dtype, b.dtype, u.dtype), []).append(row)
    for (g, b, u), rows in batches.items():
        blocks = block_table(tuple(r[3] for r in rows), BLOCK, hyper.device)
        if len(blocks):
            _momentum_kernel[(len(blocks),)](
                number_table(tuple(rows), hyper.device), blocks, hyper, control,
                G=TL_DTYPES[g], B=TL_DTYPES[b], U=TL_DTYPES[u], ACC=acc_type(b), HAS_CONTROL=control is not None,
                **OPTIONS,
            )  # fmt: skip
    dense.write_back()


def muon_update_(params, masters, updates, spec, ratios, hyper, control):
    dense, batches, next_master = _Contiguous(), {}, iter(masters)
    for p, u, bits, ratio in zip(params, updates, spec, ratios):
        master = dense(next(next_master), True) if bits & 1 else 0
        row = (dense(p, True), master, dense(u, False), p.numel(), bits >> 1)
        batches.setdefault((p.dtype, u.dtype, bool(bits & 1)), []).append((row, ratio))
    for (p, u, has_master), members in batches.items():
        rows, factors = zip(*members)
        blocks = block_table(tuple(r[3] for r in rows), BLOCK, hyper.device)
        if len(blocks):
            _update_kernel[(len(blocks),)](
                number_table(rows, hyper.device), blocks, _numbers(factors, hyper.device), hyper, control,
                P=TL_DTYPES[p], U=TL_DTYPES[u], ACC=acc_type(p), HAS_MASTER=has_master,
                HAS_CONTROL=control is not None, **OPTIONS,
            )  # fmt: skip
    dense.write_back()


_POINTERS = {"table_ptr": "*i64", "blocks_ptr": "*i64", "hyper_ptr": "*fp64", "control_ptr": "*fp64"}  # fmt: skip
AOT = [
    *(
        (_momentum_kernel, _POINTERS,
         {"G": g, "B": b, "U": u, "ACC": tl.float32, "HAS_CONTROL": True, "BLOCK": BLOCK}, 8, [])
        for g, b, u in [(tl.float32, tl.float32, tl.float32), (tl.bfloat16, tl.float32, tl.bfloat16),
                        (tl.bfloat16, tl.bfloat16, tl.bfloat16)]
    ),
    *(
        (_update_kernel, {**_POINTERS, "ratios_ptr": "*fp64"},
         {"P": p, "U": tl.bfloat16, "ACC": tl.float32, "HAS_MASTER": master, "HAS_CONTROL": True,
          "BLOCK": BLOCK}, 8, [])
        for p, master in [(tl.float32, False), (tl.bfloat16, True)]
    ),
]  # fmt: skip
