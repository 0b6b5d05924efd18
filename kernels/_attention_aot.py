"""Attention kernels that the tests compile ahead of time (tests/build/test_triton_aot.py): bf16, causal, contiguous."""

from trainwright.kernels import _attention_tiles as options
from trainwright.kernels._attention_bias import _flash_attention_dbias_kernel
from trainwright.kernels._attention_configs import FIX, look_up
from trainwright.kernels._attention_descriptors import STREAMED, USED_BY
from trainwright.kernels._attention_dkv import _flash_attention_dkv_kernel
from trainwright.kernels._attention_dq import _flash_attention_dq_kernel
from trainwright.kernels._attention_forward import _flash_attention_fwd_kernel

KERNELS = {
    "fwd": _flash_attention_fwd_kernel,
    "dkv": _flash_attention_dkv_kernel,
    "dq": _flash_attention_dq_kernel,
    "dbias": _flash_attention_dbias_kernel,
}
# Which option an argument belongs to; without it, it is None.
OPTION_OF = {
    "cu_q_ptr": "VARLEN", "cu_k_ptr": "VARLEN", "alibi_ptr": "ALIBI", "bias_ptr": "BIAS", "norm_ptr": "BIAS",
    "sinks_ptr": "SINKS", "seed_ptr": "DROPOUT",
}  # fmt: skip
HEADS, TOKENS = 16, 4096
TENSOR_CORES = ("80:mma.sync", "90:wgmma", "100:tcgen05|mma.sync")


def _row(
    kind, D, archs, more=(), fix=False, patterns=TENSOR_CORES, bits=16, causal=True, **changed
):
    """A row of `AOT` as a model of that head dim has it, with options `more`; `changed`: other constants."""
    kernel = KERNELS[kind]
    edges = "BIAS" in more or bits == 32
    names = (*(["RIGHT"] if causal else []), *(["EDGES"] if edges else []), *more)
    O = sum(getattr(options, name).value for name in names)
    BM, BN, warps, stages = look_up(kind + "+" if more else kind, min(archs), bits, D, causal)
    dtype = "bf16" if bits == 16 else "fp32"
    types = {n: f"*{dtype}" for n in kernel.arg_names if n.endswith("_ptr")}
    fp32 = ("lse", "delta", "norm", "alibi", "bias", "sinks", "dbias", "dalibi")
    types |= {f"{n}_ptr": "*fp32" for n in fp32}
    types |= {"bad_ptr": "*i32", "cu_q_ptr": "*i32", "cu_k_ptr": "*i32", "seed_ptr": "*i64"}
    types |= {n: "fp32" for n in ("scale", "softcap", "rescale")}
    integers = (
        "B",
        "H",
        "batches",
        "heads",
        "Tq",
        "Tk",
        "total_q",
        "total_k",
        "part_rows",
        "pieces",
        "left",
        "right",
        "threshold",
    )
    types |= {n: "i32" for n in integers}
    constants = {n: None for n, option in OPTION_OF.items() if option not in more}
    tma = kind in USED_BY and not fix and not edges and min(archs) >= USED_BY[kind][0]
    patterns = [*patterns, *(["90:bulk.tensor", "100:bulk.tensor"] if tma else [])]
    sizes = {"BM": BM, "BN": BN, "BD": D, "BDV": D}
    for number, (_, _, rows, columns) in enumerate(STREAMED.get(kind, ())):
        box = f"{dtype}[1,1,{sizes[rows]},{sizes[columns]}]"
        (types if tma else constants)[f"desc{number}"] = f"tensordesc<{box}>" if tma else None
    types = {n: t for n, t in types.items() if n in kernel.arg_names and n not in constants}
    for x in ("q", "k", "v", "do"):
        constants |= {f"{x}_batch": TOKENS * HEADS * D, f"{x}_row": HEADS * D, f"{x}_head": D}
    constants |= {"alibi_batch": 0, "alibi_head": 1, "bias_batch": 0, "bias_head": 0}
    constants |= {"bias_i": TOKENS, "bias_j": 1, "D": D, "Dv": D, "group": 1, "G": HEADS}
    constants |= {
        "O": O, **sizes, "TMA": tma, "EVEN_D": True, "EVEN_DV": True, "PRECISION": "ieee",
        "STAGES": stages, "FIX": fix, "NEED_DK": True, "NEED_DV": True, "NEED_DQ": True, "NEED_DALIBI": "ALIBI" in more,
        "SPLIT": 0, "SUM_I": False, "SUM_J": False, **({**FIX[kind], "STAGES": 1} if fix else {}), **changed,
    }  # fmt: skip
    constants = {n: c for n, c in constants.items() if n in kernel.arg_names}
    return kernel, types, constants, warps, patterns, {"archs": archs}


EVERY = ("SOFTCAP", "ALIBI", "BIAS", "SINKS", "DROPOUT")
AOT = [
    _row(kind, D, (arch,))
    for kind in KERNELS
    if kind != "dbias"
    for D in (64, 128)
    for arch in (80, 90, 100)
]
# Large head dims, options and the second launch. At 512 a tile is too small for wgmma.
AOT_RARE = [
    *(_row(kind, 256, (80,)) for kind in ("fwd", "dkv", "dq")),
    _row("fwd", 512, (80,)),
    _row("dkv", 512, (80,), NEED_DV=False),
    _row("dkv", 512, (80,), NEED_DK=False),
    _row("dq", 512, (80,)),
    *(_row("fwd", D, (arch,), SPLIT=2, BM=64) for D in (64, 128) for arch in (80, 90, 100)),
    *(_row(kind, 64, (80,), fix=True) for kind in ("fwd", "dkv", "dq")),
    *(_row(kind, D, (arch,), EVERY, patterns=()) for kind in KERNELS for D in (64, 128) for arch in (80, 90, 100)),
]  # fmt: skip
