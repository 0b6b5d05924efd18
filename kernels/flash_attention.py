"""Attention in Triton without the (Tq, Tk) matrix (formulas in csrc/include/trainwright/flash_attention.h).

The kernels stand in _attention_forward, _attention_dkv, _attention_dq (their formulas in _attention_backward) and
_attention_bias; _attention_scores has the score and its options, _attention_tiles what they share, _attention_split how
few queries divide their keys. Blocks that every pair sees run in a loop without masks, which reads through tensor
descriptors where it can (_attention_descriptors); only the blocks on the edge of the band compare. A kernel is launched
a second time for the programs whose result was not finite (`FIX`); the others return at once.
FLOPs: forward 4 Tq Tk D per head, backward 2.5 times that (3.5 with the recomputation), halved if causal. Bound: tensor
cores. Not yet timed on a GPU; compiled for sm_80, sm_90 and sm_100 without spills (tests/build/test_triton_aot.py).
"""

import torch
import triton
from trainwright.kernels import _attention_tiles as options
from trainwright.kernels._attention_aot import AOT, AOT_RARE
from trainwright.kernels._attention_backward import (
    _flash_attention_delta_kernel,
    _flash_attention_norm_kernel,
)
from trainwright.kernels._attention_bias import _flash_attention_dbias_kernel
from trainwright.kernels._attention_configs import FIX, architecture, padded, tile_of
from trainwright.kernels._attention_descriptors import ALIGNMENT, descriptors, refusal
from trainwright.kernels._attention_dkv import _flash_attention_dkv_kernel
from trainwright.kernels._attention_dq import _flash_attention_dq_kernel
from trainwright.kernels._attention_forward import _flash_attention_fwd_kernel
from trainwright.kernels._attention_split import (
    PIECES,
    SPLIT_KEYS,
    SPLIT_ROWS,
    WHOLE,
    _flash_attention_merge_kernel,
    most_pieces,
)
from trainwright.kernels._attention_tiles import _flash_attention_outside_kernel
from trainwright.kernels._notes import note

__all__ = ["AOT", "AOT_RARE", "flash_attention_bwd", "flash_attention_fwd"]

DELTA_ROWS = 64


def _launch(kernel, programs, warps, *named):
    """Of the named values, those that the kernel has as arguments."""
    values = {n: x for values in named for n, x in values.items()}
    if programs:
        kernel[(programs,)](
            **{n: values[n] for n in kernel.arg_names if n in values}, num_warps=warps
        )


def _run(kind, kernel, programs, call, tile, **more):
    """A kernel, and again those of its programs whose result is not finite."""
    call = call | {"bad_ptr": call["lse_ptr"].new_empty(programs, dtype=torch.int32)} | more
    call |= {"desc0": None, "desc1": None, "TMA": False}
    reason = refusal(kind, call, architecture())
    note(f"{kind} reads by pointers: {reason}" if reason else f"{kind} reads through descriptors")
    streamed = {} if reason else {"TMA": True, **descriptors(kind, call, tile)}
    _launch(kernel, programs, tile["num_warps"], call, tile, {"FIX": False}, streamed)
    _launch(kernel, programs, tile["num_warps"], call, tile, FIX[kind], {"FIX": True, "STAGES": 1})


def whole_packs(*tensors):
    """As they are, or copies with zeros behind each row, so that rows begin at and reach to multiples of 16 bytes.

    Then all loads of tiles are as wide, and Triton treats those of a loop alike. Where it can copy one operand of the
    loop's two products in the background (cp.async) and must carry the other through registers, Triton 3.8 puts its
    fence for wgmma before the wait for that copy: nothing orders the copy's writes before wgmma's reads.
    """
    return [x if _has_whole_packs(x) else _in_whole_packs(x) for x in tensors]


def _has_whole_packs(x):
    pack = ALIGNMENT // x.element_size()
    steps = [x.stride(dim) for dim in range(3) if x.shape[dim] > 1]
    return (
        x.data_ptr() % ALIGNMENT == 0
        and x.stride(3) == 1
        and not any(n % pack for n in (x.shape[3], *steps))
    )


def _in_whole_packs(x):
    pack = ALIGNMENT // x.element_size()
    D = x.shape[3]
    whole = x.new_empty(*x.shape[:3], triton.cdiv(D, pack) * pack)
    whole[..., D:] = 0
    whole[..., :D] = x
    return whole


def _strides(name, x):
    return {f"{name}_batch": x.stride(0), f"{name}_row": x.stride(1), f"{name}_head": x.stride(2)}


def _flags(**chosen):
    return sum(getattr(options, name).value for name, on in chosen.items() if on)


def _call(
    D, Dv, q, k, v, lse, cu_q, cu_k, alibi, bias, sinks, seed, max_q, max_k, scale, left, right, top_left, softcap,
    dropout_p,
):  # fmt: skip
    """What the kernels are called with, by argument. q, k and v have whole packs, D and Dv elements of a row count."""
    B, Tq, H = q.shape[:3]
    Tk, G = k.shape[1], k.shape[2]
    total_q, total_k = Tq, Tk
    if cu_q is not None:
        B, Tq, Tk = cu_q.shape[0] - 1, max_q, max_k
    # A side longer than the sequence is no limit; it must also fit 32 bits.
    reach = Tq + Tk
    left, right = (-1 if side > reach else side for side in (left, right))
    drop = round(dropout_p * 2**32)
    O = _flags(
        LEFT=left >= 0, RIGHT=right >= 0, TOP_LEFT=top_left, VARLEN=cu_q is not None, SOFTCAP=softcap > 0,
        ALIBI=alibi is not None, BIAS=bias is not None, SINKS=sinks is not None, DROPOUT=drop > 0,
        EDGES=bias is not None or q.dtype == torch.float32,
    )  # fmt: skip
    alibi_strides = alibi.stride() if alibi is not None else (0, 0)
    bias_strides = (0, 0, 0, 0)
    if bias is not None:
        bias_strides = [s if n > 1 else 0 for s, n in zip(bias.stride(), bias.shape)]
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "lse_ptr": lse, "cu_q_ptr": cu_q, "cu_k_ptr": cu_k, "alibi_ptr": alibi,
        "bias_ptr": bias, "sinks_ptr": sinks, "seed_ptr": seed if drop > 0 else None,
        **_strides("q", q), **_strides("k", k), **_strides("v", v),
        **dict(zip(("alibi_batch", "alibi_head"), alibi_strides)),
        **dict(zip(("bias_batch", "bias_head", "bias_i", "bias_j"), bias_strides)),
        "B": B, "H": H, "G": G, "group": H // max(G, 1), "Tq": Tq, "Tk": Tk, "total_q": total_q, "total_k": total_k,
        "D": D, "Dv": Dv, "causal": right == 0, "dtype": q.dtype, "scale": scale, "left": max(left, 0),
        "right": max(right, 0), "softcap": softcap,
        "threshold": max(drop - 1, 0), "rescale": 2**32 / max(2**32 - drop, 1), "O": O,
    }  # fmt: skip


def _fill_outside(x, dim, cu, value=0.0):
    """Sets the rows (along `dim`) of no sequence; x is contiguous."""
    rows = x.shape[dim]
    row_stride = x.stride(dim)
    columns, column_stride = (row_stride, 1) if dim == 1 else (x.shape[1], rows)
    if x.numel():
        _flash_attention_outside_kernel[(triton.cdiv(rows, 32),)](
            x, cu, cu.shape[0] - 1, rows, row_stride, columns, column_stride, value, ROWS=32, COLUMNS=64, num_warps=4
        )  # fmt: skip


def _split_fwd(call, tile, pieces, out, lse):
    """Of the sequences that are split: parts, and these together."""
    rows = min(call["Tq"], SPLIT_ROWS.value // call["group"])
    packed = call["cu_q_ptr"] is not None
    slots = call["total_k"] // SPLIT_KEYS.value + call["B"] if packed else call["B"] * pieces
    parts = lse.new_empty(slots, call["H"], rows, call["Dv"])
    parts_lse = lse.new_empty(slots, call["H"], rows)
    split = {"SPLIT": PIECES.value, "pieces": pieces, "part_rows": rows}
    one = call | {"lse_ptr": parts_lse, "O": call["O"] & ~options.SINKS.value}
    tile = tile | {"BM": min(tile["BM"], 64)}
    programs = triton.cdiv(rows, tile["BM"]) * call["B"] * call["H"]
    _run("fwd", _flash_attention_fwd_kernel, programs * pieces, one, tile, out_ptr=parts, **split)
    merged = {"parts_ptr": parts, "parts_lse_ptr": parts_lse, "out_ptr": out}
    programs = rows * call["B"] * call["H"]
    _launch(_flash_attention_merge_kernel, programs, 1, call, tile, split, merged)


def flash_attention_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest):
    D, Dv = q.shape[3], v.shape[3]
    out = q.new_empty(*q.shape[:3], Dv)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    call = _call(D, Dv, *whole_packs(q, k, v), lse, cu_seqlens_q, cu_seqlens_k, *rest)
    tile = tile_of("fwd", call)
    pieces = most_pieces(call, options)
    # A dense batch is split or not; of a packed one, which of its sequences are is known on the device only.
    if pieces == 1 or cu_seqlens_q is not None:
        programs = triton.cdiv(call["Tq"], tile["BM"]) * call["B"] * call["H"]
        split = {"SPLIT": WHOLE.value if pieces > 1 else 0, "pieces": 1, "part_rows": 0}
        _run("fwd", _flash_attention_fwd_kernel, programs, call, tile, out_ptr=out, **split)
    if pieces > 1:
        _split_fwd(call, tile, pieces, out, lse)
    if cu_seqlens_q is not None:
        _fill_outside(out, 1, cu_seqlens_q)
        _fill_outside(lse, 2, cu_seqlens_q, float("-inf"))
    return out, lse


def _dkv(call, dk, dv, need_dk, need_dv):
    tile = tile_of("dkv", call)
    programs = triton.cdiv(call["Tk"], tile["BN"]) * call["B"] * call["G"]
    passes = [{"NEED_DK": need_dk, "NEED_DV": need_dv}]
    if need_dk and need_dv and max(tile["BD"], tile["BDV"]) > 256:  # not enough registers for both
        passes = [{"NEED_DK": True, "NEED_DV": False}, {"NEED_DK": False, "NEED_DV": True}]
    for need in passes:
        _run("dkv", _flash_attention_dkv_kernel, programs, call, tile, dk_ptr=dk, dv_ptr=dv, **need)


def _dbias(call, bias):
    """The sum over the axes of `bias` that have size 1 and broadcast."""
    B, H, Tq, Tk = sizes = tuple(call[n] for n in ("B", "H", "Tq", "Tk"))
    summed = [d for d in range(4) if bias.shape[d] != sizes[d]]
    sum_i = 2 in summed
    sum_j = 3 in summed and not sum_i
    batches, heads = (B, H) if sum_i or sum_j else bias.shape[:2]
    shape = [batches, heads, 1 if sum_i else Tq, 1 if sum_j else Tk]
    dbias = bias.new_empty(shape, dtype=torch.float32)
    tile = tile_of("dbias", call)
    programs = batches * heads
    programs *= 1 if sum_i else triton.cdiv(Tq, tile["BM"])
    programs *= 1 if sum_j else triton.cdiv(Tk, tile["BN"])
    flags = {"SUM_I": sum_i, "SUM_J": sum_j, "batches": batches, "heads": heads, "dbias_ptr": dbias}
    _launch(_flash_attention_dbias_kernel, programs, tile["num_warps"], call, tile, flags)
    rest = [d for d in summed if dbias.shape[d] != 1]
    return dbias.sum(rest, keepdim=True) if rest else dbias


def flash_attention_bwd(dout, dlse, q, k, v, out, lse, *rest):
    *rest, need = rest
    need_dq, need_dk, need_dv, need_dalibi, need_dbias, need_dsinks = need
    dout, *wide = whole_packs(dout, q, k, v)
    call = _call(q.shape[3], v.shape[3], *wide, lse, *rest)
    cu_q, cu_k, bias, sinks = (call[f"{n}_ptr"] for n in ("cu_q", "cu_k", "bias", "sinks"))
    B, H, Tq, Dv = (call[n] for n in ("B", "H", "Tq", "Dv"))
    delta = torch.empty_like(lse)
    rows, heads = q.shape[1], q.shape[0] * H
    blocks = triton.cdiv(rows, DELTA_ROWS)
    dsinks = lse.new_empty(q.shape[0], H, blocks if sinks is not None else 0)
    call |= {
        "out_ptr": out,
        "dout_ptr": dout,
        "delta_ptr": delta,
        "norm_ptr": None,
        **_strides("do", dout),
    }
    whole = call | {
        "Tq": rows,
        "dlse_ptr": dlse,
        "dsinks_ptr": dsinks,
        "HAS_DLSE": dlse is not None,
    }
    _launch(
        _flash_attention_delta_kernel,
        blocks * heads,
        4,
        whole,
        {"BM": DELTA_ROWS, "BDV": padded(Dv)},
    )
    if bias is not None:
        call["norm_ptr"] = torch.empty_like(lse)
        tile = tile_of("dbias", call)
        programs = triton.cdiv(Tq, tile["BM"]) * heads
        _launch(_flash_attention_norm_kernel, programs, tile["num_warps"], call, tile)

    nothing, nothing32 = q.new_empty(0), lse.new_empty(0)
    dq, dk, dv = (x.new_empty(x.shape) if n else nothing for x, n in zip((q, k, v), need))
    if need_dk or need_dv:
        _dkv(call, dk, dv, need_dk, need_dv)
    dalibi, dbias = nothing32, nothing32
    if need_dq or need_dalibi:
        tile = tile_of("dq", call)
        blocks = triton.cdiv(Tq, tile["BM"])
        parts = lse.new_empty(B, H, blocks if need_dalibi else 0)
        more = {"dq_ptr": dq, "dalibi_ptr": parts, "NEED_DQ": need_dq, "NEED_DALIBI": need_dalibi}
        _run("dq", _flash_attention_dq_kernel, blocks * B * H, call, tile, **more)
        dalibi = parts.sum(2) if need_dalibi else nothing32
    if need_dbias:
        dbias = _dbias(call, bias)
    if cu_q is not None:
        for x, cu in ((dq, cu_q), (dk, cu_k), (dv, cu_k)):
            if x is not nothing:
                _fill_outside(x, 1, cu)
    return dq, dk, dv, dalibi, dbias, dsinks.sum((0, 2)) if need_dsinks else nothing32
