"""Cross entropy in Triton (formulas in csrc/include/trainwright/cross_entropy.h).

Forward: one program per row walks the vocabulary in blocks with an online softmax (running maximum and sum).
Backward: one program per row and span of blocks; exp(z - lse) again, one read and one write per logit.
Either may see only a tile of the columns, first ... first + columns - 1; then forward keeps its running state, four
doubles per row, in memory. No atomics: torch sums the row losses in a fixed order, so repeats are bit-equal.
Bytes per logit: forward s, backward 2s (s = element size). Bound: memory bandwidth.
Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
import triton.language as tl
from trainwright.kernels._tl import acc_type
from trainwright.ops._cross_entropy_tiles import MEAN, NONE, check_targets

BLOCK = 4096  # logits per step: 16 warps x 32 lanes x 8, a 16-byte load of bf16 per lane
BWD_STEPS = (
    4  # blocks per backward program: enough programs when rows are few, few scalar loads per block
)


@triton.jit
def _tanh(y, ACC: tl.constexpr):
    magnitude = tl.abs(y)
    e = tl.exp(-2.0 * magnitude)
    far = (1.0 - e) / (1.0 + e)
    s = y * y
    # Odd series near 0, where 1 - e cancels.
    p = -1382.0 / 155925.0 * s + 62.0 / 2835.0
    p = p * s - 17.0 / 315.0
    p = p * s + 2.0 / 15.0
    p = p * s - 1.0 / 3.0
    LIMIT: tl.constexpr = 0.02 if tl.float64 == ACC else 0.3
    return tl.where(magnitude < LIMIT, y + y * s * p, tl.where(y < 0, -far, far))


@triton.jit
def _scale_kernel(
    target_ptr,
    w_ptr,
    scale_ptr,
    N,
    classes,
    ignore_index,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # One program: 1 / (sum of kept class weights) and 1 / (number of kept rows); 0 if no row is kept.
    kept = tl.zeros((BLOCK_N,), tl.float64)
    total = tl.zeros((BLOCK_N,), tl.float64)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)
        t = tl.load(target_ptr + n, mask=n < N, other=0)
        keep = (n < N) & (t != ignore_index)
        kept += tl.where(keep, 1.0, 0.0)
        if HAS_WEIGHT:
            total += tl.load(w_ptr + t, mask=keep & (t >= 0) & (t < classes), other=0.0).to(
                tl.float64
            )
    count = tl.sum(kept, axis=0)
    weight = count
    if HAS_WEIGHT:
        weight = tl.sum(total, axis=0)
    some = count > 0
    tl.store(scale_ptr, tl.where(some, 1.0 / tl.where(some, weight, 1.0), 0.0))
    tl.store(scale_ptr + 1, tl.where(some, 1.0 / tl.where(some, count, 1.0), 0.0))


@triton.jit
def _fwd_kernel(
    x_ptr, target_ptr, w_ptr, state_ptr, scale_ptr, loss_ptr, lse_ptr, columns, first, classes, ignore_index,
    label_smoothing: "fp64", z_loss: "fp64", softcap: "fp64",  # noqa: F821
    FRESH: tl.constexpr, FINISH: tl.constexpr, HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
    ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    state_ptr += row * 4
    t = tl.load(target_ptr + row)
    keep = t != ignore_index
    smoothing = tl.full((), label_smoothing, tl.float64)
    cap = tl.full((), softcap, ACC)
    m = tl.full((), float("-inf"), ACC)
    sum_exp = tl.zeros((), ACC)
    sum_wz = tl.zeros((), tl.float64)
    sum_w = tl.zeros((), tl.float64)
    z_t = tl.full((), float("nan"), ACC)  # a target out of range stays NaN
    if not FRESH:
        m = tl.load(state_ptr).to(ACC)
        sum_exp = tl.load(state_ptr + 1).to(ACC)
        sum_wz = tl.load(state_ptr + 2)
        z_t = tl.load(state_ptr + 3).to(ACC)
    end = tl.where(keep, columns, 0)  # an ignored row reads nothing
    for start in range(0, end, BLOCK_V):
        c = start + tl.arange(0, BLOCK_V)
        mask = c < columns
        z = tl.load(x_ptr + c, mask=mask, other=float("-inf")).to(ACC)
        if SOFTCAP:
            z = tl.where(mask, cap * _tanh(z / cap, ACC), float("-inf"))
        new_m = tl.maximum(m, tl.max(z, axis=0))
        base = tl.where(new_m == float("-inf"), 0.0, new_m)  # all -inf so far: exp(-inf - 0) = 0
        d = z - base
        sum_exp = sum_exp * tl.exp(m - base) + tl.sum(tl.exp(d), axis=0)
        m = new_m
        if SMOOTH:
            if HAS_WEIGHT:
                w = tl.load(w_ptr + first + c, mask=mask, other=0.0).to(ACC)
            else:
                w = tl.where(mask, 1.0, 0.0).to(ACC)
            block_w = tl.sum(w, axis=0).to(tl.float64)
            sum_wz += (
                tl.sum(tl.where(mask, d * w, 0.0), axis=0).to(tl.float64)
                + base.to(tl.float64) * block_w
            )
            sum_w += block_w
    if keep & (t >= first) & (t < first + columns):
        z_t = tl.load(x_ptr + t - first).to(ACC)
        if SOFTCAP:
            z_t = cap * _tanh(z_t / cap, ACC)
    if FINISH:
        lse = m.to(tl.float64) + tl.log(sum_exp.to(tl.float64))
        w_t = tl.full((), 1.0, tl.float64)
        if HAS_WEIGHT:
            w_t = tl.load(w_ptr + t, mask=keep & (t >= 0) & (t < classes), other=0.0).to(tl.float64)
        loss = (1.0 - smoothing) * w_t * (lse - z_t.to(tl.float64))
        if SMOOTH:
            loss += smoothing / classes * (sum_w * lse - sum_wz)
        loss = loss * tl.load(scale_ptr) + tl.full((), z_loss, tl.float64) * lse * lse * tl.load(
            scale_ptr + 1
        )
        tl.store(loss_ptr + row, tl.where(keep, loss, 0.0))
        tl.store(lse_ptr + row, tl.where(keep, lse, 0.0))
    else:
        tl.store(state_ptr, m.to(tl.float64))
        tl.store(state_ptr + 1, sum_exp.to(tl.float64))
        tl.store(state_ptr + 2, sum_wz)
        tl.store(state_ptr + 3, z_t.to(tl.float64))


@triton.jit
def _bwd_kernel(
    out_ptr, x_ptr, dloss_ptr, target_ptr, w_ptr, lse_ptr, scale_ptr, total_ptr, columns, first, classes, ignore_index,
    dloss_stride, label_smoothing: "fp64", z_loss: "fp64", softcap: "fp64",  # noqa: F821
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    out_ptr += row * columns
    t = tl.load(target_ptr + row)
    keep = t != ignore_index
    inside = keep & (t >= 0) & (t < classes)
    g = tl.load(dloss_ptr + row * dloss_stride).to(tl.float64)
    u = g * tl.load(scale_ptr)
    v = g * tl.load(scale_ptr + 1)
    lse = tl.load(lse_ptr + row)
    rounded = lse.to(ACC)
    cap = tl.full((), softcap, ACC)
    smoothing = tl.full((), label_smoothing, tl.float64)
    hard = u * (1.0 - smoothing)
    if HAS_WEIGHT:
        hard = hard * tl.load(w_ptr + t, mask=inside, other=0.0).to(tl.float64)
    soft = u * smoothing / classes
    a = hard
    if SMOOTH:
        a += soft * tl.load(total_ptr).to(tl.float64)
    a += tl.full((), z_loss, tl.float64) * 2.0 * lse * v
    # exp(z - lse) = exp(z - rounded) exp(rounded - lse): the rounding of a large lse is put back.
    softmax_factor = (a * tl.exp(rounded.to(tl.float64) - lse)).to(ACC)
    soft_factor = soft.to(ACC)
    target_factor = hard.to(ACC)
    for step in range(STEPS):
        c = (tl.program_id(1) * STEPS + step) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = c < columns
        z = tl.load(x_ptr + c, mask=mask & keep, other=0.0).to(ACC)
        if SOFTCAP:
            z = cap * _tanh(z / cap, ACC)
        d = tl.exp(z - rounded) * softmax_factor
        if SMOOTH:
            if HAS_WEIGHT:
                d -= soft_factor * tl.load(w_ptr + first + c, mask=mask, other=0.0).to(ACC)
            else:
                d -= soft_factor
        d -= tl.where(first + c == t, target_factor, 0.0)
        if SOFTCAP:
            y = z / cap
            d *= 1.0 - y * y
        d = tl.where(keep, d, 0.0)
        tl.store(out_ptr + c, d.to(out_ptr.dtype.element_ty), mask=mask)


def _block(columns):
    block = min(BLOCK, triton.next_power_of_2(max(columns, 1)))
    return {"BLOCK_V": block, "num_warps": min(16, max(1, block // 256))}


def _forward(
    x,
    target,
    weight,
    state,
    scale,
    loss,
    lse,
    first,
    classes,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
):
    N, columns = x.shape
    if N:
        _fwd_kernel[(N,)](
            x, target, weight, state, scale, loss, lse, columns, first, classes, ignore_index,
            label_smoothing, z_loss, softcap,
            FRESH=first == 0, FINISH=loss is not None, HAS_WEIGHT=weight is not None, SMOOTH=label_smoothing != 0.0,
            SOFTCAP=softcap != 0.0, ACC=acc_type(x.dtype), **_block(columns),
        )  # fmt: skip


def cross_entropy_fwd(
    logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction
):
    N, V = logits.shape
    check_targets(target, V, ignore_index)
    acc = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scale = logits.new_empty(2, dtype=torch.float64)
    if reduction == MEAN:
        _scale_kernel[(1,)](
            target, weight, scale, N, V, ignore_index, HAS_WEIGHT=weight is not None, BLOCK_N=1024, num_warps=8
        )  # fmt: skip
    else:
        scale.fill_(1.0)
    rows = logits.new_empty(N, dtype=torch.float64)
    lse = logits.new_empty(N, dtype=torch.float64)
    _forward(
        logits, target, weight, rows, scale, rows, lse, 0, V, ignore_index, label_smoothing, z_loss, softcap
    )  # fmt: skip
    return (rows if reduction == NONE else rows.sum()).to(acc), lse, scale


def cross_entropy_tile_state_(
    state, logits, target, weight, first, classes, ignore_index, label_smoothing, softcap
):
    _forward(
        logits, target, weight, state, None, None, None, first, classes, ignore_index, label_smoothing, 0.0, softcap
    )  # fmt: skip


def cross_entropy_tile_grad_(
    out, dloss, logits, target, weight, lse, scale, first, classes, ignore_index, label_smoothing, z_loss, softcap
):  # fmt: skip
    N, columns = logits.shape
    if label_smoothing == 0.0:
        total = scale  # not read
    elif weight is None:
        total = torch.full((), classes, dtype=torch.float64, device=lse.device)
    else:
        total = weight.sum()
    launch = _block(columns)
    steps = min(BWD_STEPS, triton.cdiv(columns, launch["BLOCK_V"]))
    if N and columns:
        _bwd_kernel[(N, triton.cdiv(columns, steps * launch["BLOCK_V"]))](
            out, logits, dloss, target, weight, lse, scale, total, columns, first, classes, ignore_index,
            0 if dloss.numel() == 1 else 1, label_smoothing, z_loss, softcap,
            HAS_WEIGHT=weight is not None, SMOOTH=label_smoothing != 0.0, SOFTCAP=softcap != 0.0,
            ACC=acc_type(logits.dtype), STEPS=steps, **launch,
        )  # fmt: skip


def cross_entropy_bwd(
    dloss, logits, target, weight, lse, scale, ignore_index, label_smoothing, z_loss, softcap
):  # fmt: skip
    grad = torch.empty_like(logits)
    cross_entropy_tile_grad_(
        grad, dloss, logits, target, weight, lse, scale, 0, logits.shape[1], ignore_index, label_smoothing, z_loss,
        softcap,
    )  # fmt: skip
    return grad


_FWD_TYPES = {
    "x_ptr": "*bf16", "target_ptr": "*i64", "w_ptr": "*fp32", "state_ptr": "*fp64", "scale_ptr": "*fp64",
    "loss_ptr": "*fp64", "lse_ptr": "*fp64", "columns": "i32", "first": "i32", "classes": "i32", "ignore_index": "i32",
    "label_smoothing": "fp64", "z_loss": "fp64", "softcap": "fp64",
}  # fmt: skip
_BWD_TYPES = {
    "out_ptr": "*bf16", "x_ptr": "*bf16", "dloss_ptr": "*fp32", "target_ptr": "*i64", "w_ptr": "*fp32",
    "lse_ptr": "*fp64", "scale_ptr": "*fp64", "total_ptr": "*fp32", "columns": "i32", "first": "i32", "classes": "i32",
    "ignore_index": "i32", "dloss_stride": "i32", "label_smoothing": "fp64", "z_loss": "fp64", "softcap": "fp64",
}  # fmt: skip
_PLAIN = {
    "HAS_WEIGHT": False,
    "SMOOTH": False,
    "SOFTCAP": False,
    "ACC": tl.float32,
    "BLOCK_V": BLOCK,
}
_ALL = {"HAS_WEIGHT": True, "SMOOTH": True, "SOFTCAP": True, "ACC": tl.float32, "BLOCK_V": BLOCK}

# Configurations that the tests compile ahead of time for every architecture: (kernel, argument types, constants, warps,
# instructions that the PTX must contain). 16-byte loads are "ld.global.v4.b32" or wider.
AOT = [
    (_fwd_kernel, _FWD_TYPES, {"FRESH": True, "FINISH": True, **_PLAIN}, 16, [r"ex2\.approx"]),
    (_fwd_kernel, _FWD_TYPES, {"FRESH": False, "FINISH": False, **_ALL}, 16, [r"ex2\.approx"]),
    (_fwd_kernel, {**_FWD_TYPES, "x_ptr": "*fp32"}, {"FRESH": True, "FINISH": True, **_ALL}, 16, []),
    (_bwd_kernel, _BWD_TYPES, {"STEPS": BWD_STEPS, **_PLAIN}, 16, [r"ex2\.approx"]),
    (_bwd_kernel, {**_BWD_TYPES, "out_ptr": "*fp32", "x_ptr": "*fp32"}, {"STEPS": BWD_STEPS, **_ALL}, 16, []),
    (
        _scale_kernel,
        {"target_ptr": "*i64", "w_ptr": "*fp32", "scale_ptr": "*fp64", "N": "i32", "classes": "i32",
         "ignore_index": "i32"},
        {"HAS_WEIGHT": True, "BLOCK_N": 1024},
        8,
        [],
    ),
]  # fmt: skip
