"""Which attention launches read blocks through tensor descriptors (TMA, sm_90 and later), and those descriptors.

The loop over blocks that every pair sees reads what it streams (k and v; q and dout for dk and dv) as whole tiles, with
zeros past the head dim. The loop over the edge of the band reads by pointers: there, rows past the end of a packed
sequence must be 0, and a descriptor knows the end of the tensor only.
"""

from trainwright.kernels import _attention_tiles as options
from triton.tools.tensor_descriptor import TensorDescriptor

# By kernel, the first architecture on which it uses them, and the largest head dim. Where dk and dv fill all registers
# (on sm_90; with large head dims anywhere), those that wait for what a descriptor reads would spill.
USED_BY = {"fwd": (90, 512), "dq": (90, 512), "dkv": (100, 256)}
ALIGNMENT = 16  # bytes: of the base and of every stride
# By kernel: the names of what it streams, in arguments and in messages, and the constants of a tile's size.
STREAMED = {
    "fwd": (("k", "k_ptr", "BN", "BD"), ("v", "v_ptr", "BN", "BDV")),
    "dq": (("k", "k_ptr", "BN", "BD"), ("v", "v_ptr", "BN", "BDV")),
    "dkv": (("q", "q_ptr", "BM", "BD"), ("dout", "dout_ptr", "BM", "BDV")),
}


def _stride(x, dim):
    """In bytes. An axis of size 1 is never stepped along, whatever its stride."""
    return x.stride(dim) * x.element_size() if x.shape[dim] > 1 else ALIGNMENT


def _unfit(name, x):
    """Why x (B, T, heads, D), which has whole packs (flash_attention.py), has no descriptor, or None."""
    if x.numel() == 0:
        return f"{name} is empty"
    for dim, axis in enumerate(("batches", "rows", "heads")):
        step = _stride(x, dim)
        if step <= 0:
            return f"{step} bytes between {axis} of {name}"
        if step >= 2**40 or x.shape[dim] >= 2**31:
            return f"{axis} of {name} are too far apart or too many"
    return None


def refusal(kind, call, arch):
    """Why this launch reads by pointers, or None."""
    if arch < 90:
        return f"sm_{arch} has no tensor descriptors"
    first, most = USED_BY[kind]
    if arch < first or max(call["D"], call["Dv"]) > most:
        return f"its registers are full on sm_{arch} with head dim {max(call['D'], call['Dv'])}"
    if call["O"] & options.EDGES.value:
        why = "a bias may hide any pair" if call["O"] & options.BIAS.value else "its dtype is fp32"
        return f"{why}, so every block is an edge"
    return next(
        (r for name, at, _, _ in STREAMED[kind] if (r := _unfit(name, call[at])) is not None), None
    )


def descriptors(kind, call, tile):
    """By argument: (batch, head, row, element) of what the kernel streams, a tile of rows at a time."""
    made = {}
    for number, (_, at, rows, columns) in enumerate(STREAMED[kind]):
        x = call[at]
        B, T, heads, D = x.shape
        steps = [_stride(x, dim) // x.element_size() for dim in (0, 2, 1)]
        made[f"desc{number}"] = TensorDescriptor(
            x, [B, heads, T, D], [*steps, 1], [1, 1, tile[rows], tile[columns]]
        )
    return made
