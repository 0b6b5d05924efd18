"""What the optimizer kernels share: one multi-tensor driver around the formula of an op.

`step` runs an op of trainwright/ops/_optimizer.py on all its tensors in two launches (LAMB: four), whatever the number
of tensors and parameter groups, as long as these are stored in the same formats; tensors in other formats, and those
whose addresses or sizes are odd, add a launch each. `_prepare_kernel` raises the step counts and computes the scalars
of each tensor in fp64, once instead of in every program. A program of `_step_kernel` walks through a chunk of one
tensor in tiles of 1024 elements, 4 for each thread: then the accesses of a warp are dense in every format, without
exchanges between threads. The scales of int8 states are read and written for the whole chunk at once. Multiplier, skip
flag, step counts and hyper-parameters are read on the device.

An op gives ``scalars(h, t)``, the numbers that its formula takes, from a row of hyper-parameters and the step, and
``formula(p, g, s0, s1, s2, k, SLOTS)``, the new parameter and states. s0, s1 and s2 are the op's states in its order;
the bits of SLOTS say which exist. k holds the scalars. Everything is compiled without fused multiply-adds.

Bytes per parameter: what the formats say (28 for AdamW in fp32; 10.1 with int8 states and bf16 otherwise), and of the
tables 0.01, with int8 states 0.02 (a large tensor's share). Bound: memory bandwidth. Counted on the virtual GPU; not
yet timed on a GPU.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from trainwright.kernels._multi_tensor import TL_DTYPES, chunk_table, number_table, same_order
from trainwright.kernels._state_format import (
    bf16_state,
    block8_encode,
    block8_value,
    round_parameter,
    split16,
    split16_join,
    stochastic_words,
)
from trainwright.kernels._tl import acc_type
from trainwright.ops import _optimizer_formats as formats
from trainwright.ops._optimizer import unpack_spec

WARPS = 8
TILE = 4 * 32 * WARPS
PROGRAMS = 2048  # fill any GPU more than once; with fewer, chunks are smaller
# The most that a program works through: then its rows of the tables are next to nothing beside it.
CHUNK = 256 * TILE
SCALED_CHUNK = 64 * TILE  # of a program with int8 states, of which a thread holds one scale
TENSORS = 128  # of a program of _prepare_kernel
# How it is launched: a program rounds every operation by itself.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}

# Columns of the table of tensors, of which the last three pairs are (state, its scales).
_N, _OFFSET, _K, _P, _G, _MASTER, _STATES = (tl.constexpr(i) for i in range(7))
_WIDTH = tl.constexpr(12)
_MULTIPLIER, _STEP, _SCALARS = (tl.constexpr(i) for i in range(3))  # of the table of scalars
_COUNT = tl.constexpr(8)  # what a formula may take
_K_WIDTH = tl.constexpr(10)
BF16, INT8 = (tl.constexpr(f) for f in (formats.BF16_STATE, formats.INT8_STATE))
FP32, SPLIT16 = (tl.constexpr(f) for f in (formats.FP32_MASTER, formats.SPLIT16_MASTER))
BLOCK = tl.constexpr(formats.STATE_BLOCK)
# What a launch does: all; or half of an op whose parameters wait for norms of the whole tensor.
WHOLE, STATES, PARAMETER = (tl.constexpr(i) for i in range(3))


@triton.jit
def beta_power(base, t):
    """base ** t for 0 <= base < 1, fp64. 0 ** t: exp2 of -inf."""
    return tl.exp2(t * tl.log2(base))


@triton.jit
def _prepare_kernel(
    steps_ptr, hyper_ptr, control_ptr, k_ptr, count, scalars: tl.constexpr, HYPER: tl.constexpr, TENSORS: tl.constexpr
):  # fmt: skip
    """steps_ptr: for each tensor the address of its step, and its group. HYPER: columns of hyper, maximize the last."""
    tensor = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    mask = tensor < count
    row = tl.where(mask, tensor, 0).to(tl.int64)
    step_ptr = tl.load(steps_ptr + 2 * row).to(tl.pointer_type(tl.float64))
    h = hyper_ptr + HYPER * tl.load(steps_ptr + 2 * row + 1)
    k = k_ptr + _K_WIDTH * row
    t = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    multiplier = 1.0 - 2.0 * tl.load(h + (HYPER - 1))
    alive = mask
    if control_ptr is not None:
        multiplier = multiplier * tl.load(control_ptr)
        alive = tensor < tl.where(tl.load(control_ptr + 1) == 0.0, count, 0)
    tl.store(step_ptr, t, mask=alive)
    tl.store(k + _MULTIPLIER, multiplier, mask=mask)
    tl.store(k + _STEP, t, mask=mask)
    values = scalars(h, t)
    for j in tl.static_range(len(values)):
        tl.store(k + (_SCALARS + j), values[j], mask=mask)


@triton.jit
def _pointer(at, T: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a table, of elements T; ALIGNED: those are read four at a time."""
    p = tl.load(at).to(tl.pointer_type(T))
    if ALIGNED:
        p = tl.multiple_of(p, 16 if T.primitive_bitwidth >= 32 else T.primitive_bitwidth // 2)
    return p


@triton.jit
def _state(
    row,
    SLOT: tl.constexpr,
    STATE: tl.constexpr,
    SIGNED: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The addresses of a state and of its scales."""
    CODE: tl.constexpr = tl.int8 if (SIGNED >> SLOT) & 1 else tl.uint8
    T: tl.constexpr = CODE if STATE == INT8 else (tl.bfloat16 if STATE == BF16 else ACC)
    at = row + (_STATES + 2 * SLOT)
    return _pointer(at, T, ALIGNED), _pointer(at + 1, tl.float32, False)


@triton.jit
def _load_scales(state, block, mask, SLOT: tl.constexpr, SLOTS: tl.constexpr, STATE: tl.constexpr):
    """The scales of a chunk, (blocks of a tile, tiles): what a tile needs by itself is less than a sector."""
    if STATE == INT8 and (SLOTS >> SLOT) & 1:
        return tl.load(state[1] + block, mask=mask, other=0.0)
    else:
        return tl.zeros(block.shape, tl.float32)


@triton.jit
def _store_scales(
    scales, state, block, mask, SLOT: tl.constexpr, SLOTS: tl.constexpr, STATE: tl.constexpr
):
    if STATE == INT8 and (SLOTS >> SLOT) & 1:
        tl.store(state[1] + block, scales, mask=mask)


@triton.jit
def _load_state(
    state, scales, i, mask, here, SLOT: tl.constexpr, SLOTS: tl.constexpr, STATE: tl.constexpr,
    SIGNED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """here: which column of the chunk's scales is the tile's."""
    if not (SLOTS >> SLOT) & 1:
        return tl.zeros(i.shape, ACC)
    elif STATE == INT8:
        code = tl.load(state[0] + i, mask=mask, other=0)
        scale = tl.sum(tl.where(here, scales, 0.0), axis=1)
        return block8_value(code, scale, (SIGNED >> SLOT) & 1)
    else:
        return tl.load(state[0] + i, mask=mask, other=0.0).to(ACC)


@triton.jit
def _store_state(
    x, state, scales, i, mask, here, words, SLOT: tl.constexpr, SLOTS: tl.constexpr, STATE: tl.constexpr,
    SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Stores x. Returns what it will be read as, and the chunk's scales with those of the tile."""
    if not (SLOTS >> SLOT) & 1:
        return x, scales
    elif STATE == INT8:
        code, scale = block8_encode(tl.where(mask, x, 0.0), words, (SIGNED >> SLOT) & 1, STOCHASTIC)
        tl.store(state[0] + i, code, mask=mask)
        scales = tl.where(here, scale[:, None], scales)
        return block8_value(code, scale, (SIGNED >> SLOT) & 1), scales
    elif STATE == BF16:
        stored = bf16_state(x, words, (SIGNED >> SLOT) & 1, STOCHASTIC)
        tl.store(state[0] + i, stored, mask=mask)
        return stored.to(tl.float32), scales
    else:
        tl.store(state[0] + i, x, mask=mask)
        return x, scales


@triton.jit
def _load_parameter(p, master, i, mask, MASTER: tl.constexpr, ACC: tl.constexpr):
    if MASTER == FP32:
        return tl.load(master + i, mask=mask, other=0.0)
    elif MASTER == SPLIT16:
        remainder = tl.load(master + i, mask=mask, other=0)
        return split16_join(tl.load(p + i, mask=mask, other=0.0), remainder)
    else:
        return tl.load(p + i, mask=mask, other=0.0).to(ACC)


@triton.jit
def _store_parameter(
    x, p, master, i, mask, words, P: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Stores x and returns what it will be read as."""
    if MASTER == FP32:
        tl.store(master + i, x, mask=mask)
        tl.store(p + i, round_parameter(x, words, P, False), mask=mask)
        return x
    elif MASTER == SPLIT16:
        parameter, remainder = split16(x)
        tl.store(master + i, remainder, mask=mask)
        tl.store(p + i, parameter, mask=mask)
        return split16_join(parameter, remainder)
    else:
        parameter = round_parameter(x, words, P, STOCHASTIC)
        tl.store(p + i, parameter, mask=mask)
        return parameter.to(x.dtype)


@triton.jit
def _square(x, mask):
    wide = tl.where(mask, x, 0.0).to(tl.float64)
    return wide * wide


@triton.jit(do_not_specialize=["seed"])
def _step_kernel(
    table_ptr, chunks_ptr, k_ptr, control_ptr, lost_ptr, norms_ptr, seed, formula: tl.constexpr,
    direction: tl.constexpr, PASS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr,
    MASTER: tl.constexpr, STATE: tl.constexpr, SLOTS: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, SCALED_CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of a tensor. norms_ptr: a pair for each program, the squares of the parameter and of ``direction``."""
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks_ptr + 3 * program
    row = table_ptr + _WIDTH * tl.load(chunk)
    begin, end = tl.multiple_of(tl.load(chunk + 1), TILE), tl.load(chunk + 2)
    n = tl.load(row + _N)
    if control_ptr is not None:
        n = tl.where(tl.load(control_ptr + 1) == 0.0, n, 0)  # a skipped step has no elements
    if ALIGNED:
        n = tl.multiple_of(n, 4)
    offset = tl.load(row + _OFFSET)
    k_row = k_ptr + _K_WIDTH * tl.load(row + _K)
    multiplier, step = tl.load(k_row + _MULTIPLIER).to(ACC), tl.load(k_row + _STEP)
    k_row += _SCALARS
    k = (
        tl.load(k_row).to(ACC), tl.load(k_row + 1).to(ACC), tl.load(k_row + 2).to(ACC), tl.load(k_row + 3).to(ACC),
        tl.load(k_row + 4).to(ACC), tl.load(k_row + 5).to(ACC), tl.load(k_row + 6).to(ACC), tl.load(k_row + 7).to(ACC),
    )  # fmt: skip
    p_ptr = _pointer(row + _P, P, ALIGNED)
    g_ptr = _pointer(row + _G, G, ALIGNED)
    master_ptr = _pointer(row + _MASTER, tl.int16 if MASTER == SPLIT16 else tl.float32, ALIGNED)
    state0 = _state(row, 0, STATE, SIGNED, ACC, ALIGNED)
    state1 = _state(row, 1, STATE, SIGNED, ACC, ALIGNED)
    state2 = _state(row, 2, STATE, SIGNED, ACC, ALIGNED)

    BLOCKS: tl.constexpr = TILE // BLOCK
    in_tile = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    end = tl.minimum(end, n)
    tile = tl.arange(0, SCALED_CHUNK // TILE)[None, :]
    block = begin // BLOCK + tile * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    block_mask = block * BLOCK < end
    scales0 = _load_scales(state0, block, block_mask, 0, SLOTS, STATE)
    scales1 = _load_scales(state1, block, block_mask, 1, SLOTS, STATE)
    scales2 = _load_scales(state2, block, block_mask, 2, SLOTS, STATE)
    moved = tl.zeros((BLOCKS, BLOCK), tl.int32)
    gone = tl.zeros((BLOCKS, BLOCK), tl.int32)
    p_squares = tl.zeros((BLOCKS, BLOCK), tl.float64)
    u_squares = tl.zeros((BLOCKS, BLOCK), tl.float64)
    for start in range(begin, end, TILE):
        start = tl.multiple_of(start, TILE)
        i = start + in_tile
        mask = i < n
        here = tile == (start - begin) // TILE

        old = _load_parameter(p_ptr, master_ptr, i, mask, MASTER, ACC)
        s0 = _load_state(state0, scales0, i, mask, here, 0, SLOTS, STATE, SIGNED, ACC)
        s1 = _load_state(state1, scales1, i, mask, here, 1, SLOTS, STATE, SIGNED, ACC)
        s2 = _load_state(state2, scales2, i, mask, here, 2, SLOTS, STATE, SIGNED, ACC)
        g = tl.zeros((BLOCKS, BLOCK), ACC)
        if PASS != PARAMETER:
            g = tl.load(g_ptr + i, mask=mask, other=0.0).to(ACC) * multiplier
        new, s0, s1, s2 = formula(old, g, s0, s1, s2, k, SLOTS)

        words = tl.zeros((BLOCKS, BLOCK), tl.uint32)
        if STOCHASTIC:
            QUADS: tl.constexpr = ALIGNED or STATE == INT8  # then offset is a multiple of 256
            words = stochastic_words(seed, offset + start, step, BLOCKS, BLOCK, QUADS)
        if PASS != PARAMETER:
            s0, scales0 = _store_state(
                s0, state0, scales0, i, mask, here, words, 0, SLOTS, STATE, SIGNED, STOCHASTIC
            )
            s1, scales1 = _store_state(
                s1, state1, scales1, i, mask, here, words, 1, SLOTS, STATE, SIGNED, STOCHASTIC
            )
            s2, scales2 = _store_state(
                s2, state2, scales2, i, mask, here, words, 2, SLOTS, STATE, SIGNED, STOCHASTIC
            )
        if PASS == STATES:
            u = direction(old, s0, s1, k)
            p_squares += _square(old, mask)
            u_squares += _square(u, mask)
        else:
            kept = _store_parameter(new, p_ptr, master_ptr, i, mask, words, P, MASTER, STOCHASTIC)
            if lost_ptr is not None:
                moves = mask & (new != old)
                moved += moves.to(tl.int32)
                gone += (moves & (kept == old)).to(tl.int32)
    if PASS != PARAMETER and STATE == INT8:
        tl.debug_barrier()  # every thread has read its scales
        _store_scales(scales0, state0, block, block_mask, 0, SLOTS, STATE)
        _store_scales(scales1, state1, block, block_mask, 1, SLOTS, STATE)
        _store_scales(scales2, state2, block, block_mask, 2, SLOTS, STATE)
    if PASS == STATES:
        tl.store(norms_ptr + 2 * program, tl.sum(p_squares))
        tl.store(norms_ptr + 2 * program + 1, tl.sum(u_squares))
    elif lost_ptr is not None:  # whole numbers: the order of the additions does not matter
        tl.atomic_add(lost_ptr, tl.sum(moved).to(tl.float64))
        tl.atomic_add(lost_ptr + 1, tl.sum(gone).to(tl.float64))


class Format(NamedTuple):
    """What the tensors of a launch share. slots: bits of the states that exist; aligned: four elements at a time."""

    p: torch.dtype
    g: torch.dtype
    master: int
    state: int
    slots: int
    stochastic: bool
    aligned: bool


@dataclass
class Work:
    """The tensors of one call. `rows`: the table of the tensors of each format; `copies` are the originals of tensors
    that had to be copied, with the copies; `alive` holds what the addresses in the rows belong to."""

    rows: dict[Format, list[tuple[int, ...]]] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)

    def write_back(self):
        for original, copy in self.copies:
            original.copy_(copy)


def collect(op, params, grads, masters, states, specs, offsets):
    next_master, next_state = iter(masters), iter(states)
    work = Work()
    for index, (p, g, spec, offset) in enumerate(zip(params, grads, specs, offsets)):
        in_blocks = spec.state == formats.INT8_STATE
        tensors = [p, g, next(next_master) if spec.master else None]
        scales, slots = [], 0
        for slot, state in enumerate(op.states):
            here = state.flag == 0 or bool(state.flag & spec.flags)
            slots |= here << slot
            tensors.append(next(next_state) if here else None)
            scales.append(next(next_state) if here and in_blocks else None)
        n = p.numel()
        if n == 0:
            continue
        half = p.dtype in (torch.bfloat16, torch.float16)
        narrow = spec.state != formats.FULL_STATE or (half and spec.master == formats.NO_MASTER)
        stochastic = spec.stochastic and narrow
        flat = same_order(tensors, row_major=stochastic or in_blocks)
        changed = [(t, c) for t, c in zip(tensors, flat) if c is not t]
        work.copies += [pair for pair in changed if pair[0] is not g]
        work.alive += [t for t in (*flat, *scales) if t is not None]
        at = [0 if t is None else t.data_ptr() for t in flat]
        steps = [1 if t is None else min(16, 4 * t.element_size()) for t in flat]
        is_aligned = (n | offset) % 4 == 0 and all(a % b == 0 for a, b in zip(at, steps))
        pairs = []
        for a, c in zip(at[3:], scales):
            pairs += [a, 0 if c is None else c.data_ptr()]
        row = (n, offset, index, *at[:3], *pairs, *[0] * (6 - len(pairs)))
        form = Format(p.dtype, g.dtype, spec.master, spec.state, slots, stochastic, is_aligned)
        work.rows.setdefault(form, []).append(row)
    return work


def prepare(op, scalars, steps, specs, hyper, control):
    """Raises the steps; the table of the tensors' scalars."""
    rows = tuple((t.data_ptr(), s.group) for t, s in zip(steps, specs))
    k = torch.empty((len(rows), _K_WIDTH.value), dtype=torch.float64, device=hyper.device)
    _prepare_kernel[(triton.cdiv(len(rows), TENSORS),)](
        number_table(rows, hyper.device), hyper, control, k, len(rows),
        scalars=scalars, HYPER=len(op.hyper), TENSORS=TENSORS, **OPTIONS,
    )  # fmt: skip
    return k


def chunk_of(n, form):
    """Elements of a program, of n to be divided: fewer if there would be few programs."""
    most = SCALED_CHUNK if form.state == formats.INT8_STATE else CHUNK
    return min(most, max(1, n // (TILE * PROGRAMS)) * TILE)


def constants(op, form):
    return {
        "P": TL_DTYPES[form.p], "G": TL_DTYPES[form.g], "ACC": acc_type(form.p), "MASTER": form.master,
        "STATE": form.state, "SLOTS": form.slots, "SIGNED": sum(s.signed << i for i, s in enumerate(op.states)),
        "STOCHASTIC": form.stochastic, "ALIGNED": form.aligned,
        "TILE": TILE if form.aligned else TILE // 2,  # more registers for addresses
        "SCALED_CHUNK": SCALED_CHUNK,
    }  # fmt: skip


def launch(
    op, form, rows, chunks, k, control, lost, seed, formula, *, direction=None, norms=None, do=WHOLE
):
    """chunks: for each row, how many elements a program takes."""
    table = chunk_table(tuple(r[0] for r in rows), tuple(chunks), k.device)
    _step_kernel[(len(table),)](
        number_table(tuple(rows), k.device), table, k, control, lost, norms, seed,
        formula=formula, direction=direction, PASS=do, **constants(op, form), **OPTIONS,
    )  # fmt: skip


def step(
    op, scalars, formula, params, grads, masters, states, steps, spec, offsets, hyper, control, seed, lost
):  # fmt: skip
    """An op of which every element is independent of the others. Arguments: trainwright/ops/_optimizer.py."""
    specs = [unpack_spec(s) for s in spec]
    k = prepare(op, scalars, steps, specs, hyper, control)
    work = collect(op, params, grads, masters, states, specs, offsets)
    for form, rows in work.rows.items():
        chunk = chunk_of(sum(row[0] for row in rows), form)
        launch(op, form, rows, [chunk] * len(rows), k, control, lost, seed, formula)
    work.write_back()


def aot(op, scalars, formula, forms, *, do=WHOLE, lost=False, direction=None):
    """Configurations to compile ahead of time: of `_prepare_kernel`, and of `_step_kernel` in some formats."""
    options = {"enable_fp_fusion": False}
    table, numbers = (
        {"table_ptr": "*i64", "chunks_ptr": "*i64"},
        {"k_ptr": "*fp64", "control_ptr": "*fp64"},
    )
    prepare_types = {"steps_ptr": "*i64", "hyper_ptr": "*fp64", **numbers, "count": "i32"}
    prepare_constants = {"scalars": scalars, "HYPER": len(op.hyper), "TENSORS": TENSORS}
    types = {**table, **numbers, "seed": "i64"}
    given = {"lost_ptr": None, "norms_ptr": None}
    for name, here in (("lost_ptr", lost), ("norms_ptr", direction is not None)):
        if here:
            types[name] = "*fp64"
            del given[name]
    return [(_prepare_kernel, prepare_types, prepare_constants, WARPS, [], options)] + [
        (
            _step_kernel,
            types,
            {
                "formula": formula,
                "direction": direction,
                "PASS": do,
                **given,
                **constants(op, form),
            },
            WARPS,
            [r"mul\.rn\.f32", r"ld\.global\S*\.v4\.b32"]
            if form.aligned and form.p == torch.float32
            else [],
            options,
        )
        for form in forms
    ]


# Most of the code there is, for `aot`.
_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
FORMS = [
    Format(_F32, _F32, formats.NO_MASTER, formats.FULL_STATE, 7, False, True),
    Format(_BF16, _BF16, formats.FP32_MASTER, formats.FULL_STATE, 7, False, True),
    Format(_BF16, _BF16, formats.SPLIT16_MASTER, formats.BF16_STATE, 7, True, True),
    Format(_BF16, _BF16, formats.NO_MASTER, formats.INT8_STATE, 7, True, True),
    Format(_F16, _F32, formats.NO_MASTER, formats.INT8_STATE, 7, True, False),
]
