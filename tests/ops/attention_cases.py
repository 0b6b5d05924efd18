"""What the tests of the attention functions share: the reference, the cases and who runs them.

The kernels of a backend take the options that its candidate does not list as lacking; the tables ask every backend for
all of those.
"""

import functools

import torch
import trainwright as tw
from numerics import backends_for_tests
from trainwright.ops._attention_reference import uniform_bits
from trainwright.ops.flash_attention import CANDIDATES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = backends_for_tests(tw.flash_attention)
COMPILED = [b for b in BACKENDS if b != "triton"]  # fast enough for large shapes and many cases
NAN, INF = float("nan"), float("inf")


def candidate(backend):
    name = "cuda" if backend == "vgpu" else backend
    return next(c for c in CANDIDATES if c.backend == name)


def takes(backend, *options):
    return not set(options) & set(candidate(backend).lacks)


def dtypes_of(backend, every=True):
    """Those of the tables: all that the kernels take, or the two of training; one in the slow interpreter."""
    few = {"triton": [torch.float32], "torch": [torch.float32, torch.bfloat16][: 1 + every]}
    dtypes = few.get(backend) or list(candidate(backend).dtypes)
    return dtypes if every else dtypes[:2]


def dtype_for(backend):
    """Of the tests that are not about dtypes."""
    return torch.float32 if torch.float32 in candidate(backend).dtypes else torch.bfloat16


FP32 = [b for b in BACKENDS if dtype_for(b) == torch.float32]
FP32_COMPILED = [b for b in COMPILED if b in FP32]


def backends_taking(*options, among=BACKENDS):
    return [b for b in among if takes(b, *options)]


def with_fp64(backends):
    return [b for b in backends if torch.float64 in candidate(b).dtypes]


# id: (B, Tq, Tk, H, G, D, Dv), options
CASES = {
    "full": ((2, 37, 37, 2, 2, 16, 16), {}),
    "causal": ((2, 37, 37, 2, 2, 16, 16), {"causal": True}),
    "several blocks": ((1, 197, 197, 2, 1, 64, 64), {"causal": True}),
    "several blocks, full": ((1, 130, 150, 2, 2, 32, 32), {}),
    "one pair": ((3, 1, 1, 2, 1, 8, 8), {"causal": True}),
    "one query": ((2, 1, 75, 4, 2, 16, 16), {"causal": True}),
    "bottom-right, more keys": ((1, 30, 71, 2, 1, 16, 16), {"causal": True}),
    "bottom-right, more queries": ((1, 90, 21, 2, 1, 16, 16), {"causal": True}),
    "top-left, more keys": ((1, 30, 71, 2, 1, 16, 16), {"causal": True, "causal_align": "top-left"}),
    "top-left, more queries": ((1, 90, 21, 2, 1, 16, 16), {"causal": True, "causal_align": "top-left"}),
    "grouped heads": ((2, 33, 33, 6, 2, 16, 16), {"causal": True}),
    "one key head": ((1, 33, 40, 5, 1, 16, 16), {}),
    "scale 0": ((1, 20, 20, 1, 1, 16, 16), {"causal": True, "scale": 0.0}),
    "scale below 0": ((1, 70, 70, 1, 1, 16, 16), {"causal": True, "scale": -0.7}),
    "head dim 1": ((1, 20, 20, 1, 1, 1, 1), {"causal": True}),
    "head dim 13, value dim 37": ((1, 66, 66, 2, 2, 13, 37), {"causal": True}),
    "head dim 160": ((1, 40, 40, 1, 1, 160, 160), {"causal": True}),
    "head dim 256": ((1, 20, 70, 1, 1, 256, 256), {}),
    "window": ((1, 150, 150, 2, 1, 16, 16), {"causal": True, "window": (40, 0)}),
    "window both sides": ((1, 90, 140, 1, 1, 16, 16), {"window": (3, 70)}),
    "window leaves queries without keys": ((1, 90, 20, 1, 1, 16, 16), {"window": (5, 2), "causal_align": "top-left"}),
    "no keys": ((2, 5, 0, 2, 1, 8, 8), {}),
    "no queries": ((2, 0, 5, 2, 1, 8, 8), {"causal": True}),
    "no batch": ((0, 5, 5, 2, 1, 8, 8), {"causal": True}),
    "no heads": ((2, 5, 5, 0, 1, 8, 8), {"causal": True}),
}  # fmt: skip
# The interpreter is slow: there, one case per path of the kernels.
INTERPRETED = [
    "full", "causal", "bottom-right, more queries", "top-left, more keys", "scale below 0",
    "head dim 13, value dim 37", "window both sides", "no keys",
]  # fmt: skip
INTERPRETED_BF16 = ["causal", "top-left, more keys", "window both sides"]


@functools.cache
def visible(Tq, Tk, causal=False, causal_align="bottom-right", window=None):
    """(Tq, Tk), element by element from the contract."""
    left, right = window or (-1, -1)
    if causal:
        right = 0
    seen = torch.zeros(Tq, Tk, dtype=torch.bool)
    for i in range(Tq):
        p = i + (Tk - Tq if causal_align == "bottom-right" else 0)
        for j in range(Tk):
            seen[i, j] = (left < 0 or j >= p - left) and (right < 0 or j <= p + right)
    return seen


def reference(
    q, k, v, scale=None, softcap=None, alibi_slopes=None, bias=None, sinks=None, return_lse=True, dropout_p=0.0,
    seed=None, first_head=0, batch=0, **band,
):  # fmt: skip
    """Plain torch; `batch`: the index of the first sequence, which dropout depends on."""
    Tq, Tk, H, G = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if alibi_slopes is not None:
        distance = (torch.arange(Tq)[:, None] + (Tk - Tq) - torch.arange(Tk)).abs().to(s.dtype)
        s = s - alibi_slopes[..., None, None] * distance
    s = s.masked_fill(~visible(Tq, Tk, **band), -INF)
    empty = (s == -INF).all(-1)
    s = s.masked_fill(empty[..., None], 0.0)
    lse, p = torch.logsumexp(s, -1), torch.softmax(s, -1)
    if sinks is not None:
        p = p * torch.sigmoid(lse - sinks[:, None])[..., None]
    p = p.masked_fill(empty[..., None], 0.0)
    if dropout_p > 0:
        threshold = round(dropout_p * 2**32)
        bits = uniform_bits(torch.tensor(seed), *p.shape, batch, first_head)
        p = p * (bits >= threshold).to(p.dtype) * (2**32 / (2**32 - threshold))
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    lse = lse.masked_fill(empty, -INF).to(torch.float64 if q.dtype == torch.float64 else torch.float32)  # fmt: skip
    return (out, lse) if return_lse else out


def qkv(B, Tq, Tk, H, G, D, Dv, dtype=torch.float32):
    shapes = {"q": (B, Tq, H, D), "k": (B, Tk, G, D), "v": (B, Tk, G, Dv)}
    return {n: torch.randn(s, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def with_lse(**arguments):
    return tw.flash_attention(return_lse=True, **arguments)


# id: options, shapes of their tensors by the sizes of q and k. Every backend runs those that it takes.
OPTIONS = {
    "softcap": ({"softcap": 1.3, "causal": True}, {}),
    "alibi per head": ({"causal": True}, {"alibi_slopes": "H"}),
    "alibi per batch and head": ({"causal_align": "top-left"}, {"alibi_slopes": "BH"}),
    "bias": ({"causal": True}, {"bias": "BHij"}),
    "bias, broadcast over batch and queries": ({}, {"bias": "H1j"}),
    "bias, broadcast over heads and keys": ({"window": (20, 20)}, {"bias": "B1i1"}),
    "sinks": ({"causal": True, "window": (2, 0)}, {"sinks": "H"}),
    "dropout": ({"dropout_p": 0.3, "seed": 5}, {}),
    "all at once": (
        {"softcap": 2.0, "causal": True, "causal_align": "top-left", "dropout_p": 0.1, "seed": 2**40 + 3},
        {"alibi_slopes": "H", "bias": "1Hij", "sinks": "H"},
    ),
}  # fmt: skip


def option_inputs(case, B, Tq, Tk, H, G, D, Dv, dtype=torch.float32):
    """q, k, v and the tensors of an option case."""
    sizes = {"B": B, "H": H, "i": Tq, "j": Tk, "1": 1}
    extra = {
        n: torch.rand([sizes[c] for c in letters], dtype=torch.float64).to(dtype)
        for n, letters in OPTIONS[case][1].items()
    }
    return qkv(B, Tq, Tk, H, G, D, Dv, dtype) | extra


def options_used(case):
    options, shapes = OPTIONS[case]
    return [*shapes, *(o for o in options if o in ("softcap", "dropout_p"))]
