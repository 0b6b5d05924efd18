"""tw.flash_attention_varlen: what tw.flash_attention gives for each sequence alone, on every backend that takes it."""

import functools

import pytest
import torch
import trainwright as tw
from attention_cases import (
    COMPILED,
    DTYPES,
    INF,
    NAN,
    backends_taking,
    dtype_for,
    dtypes_of,
    reference,
    with_fp64,
)
from numerics import (
    check_compile,
    check_gradcheck,
    check_layouts,
    check_opcheck,
    check_reference,
    same_bits,
)

# id: (lengths of q, lengths of k, unused rows at either end, H, G, D, Dv), options, shapes of their tensors
CASES = {
    "causal": (((37, 70, 5), (37, 70, 5), 0, 2, 1, 16, 16), {"causal": True}, {}),
    "full, other lengths of k": (((3, 66), (71, 9), 0, 4, 2, 16, 24), {}, {}),
    "empty sequences": (((0, 5, 0, 7, 4, 0), (3, 5, 0, 0, 9, 0), 0, 2, 2, 8, 8), {"causal": True}, {}),
    "one token each": (((1, 1, 1), (4, 1, 9), 0, 4, 1, 8, 8), {"causal": True}, {}),
    "many more queries than keys": (((70, 9), (3, 2), 0, 2, 2, 8, 8), {"causal": True}, {}),
    "rows before and after": (((5, 6), (8, 3), 4, 2, 1, 8, 8), {"causal": True}, {}),
    "top-left": (((9, 20), (20, 9), 2, 2, 1, 8, 8), {"causal": True, "causal_align": "top-left"}, {}),
    "window": (((40, 75), (50, 75), 0, 2, 1, 8, 8), {"window": (9, 3)}, {}),
    "softcap": (((30, 7), (40, 7), 1, 2, 1, 8, 8), {"causal": True, "softcap": 1.3}, {}),
    "alibi per head": (((30, 7), (40, 9), 1, 4, 2, 8, 8), {"causal": True}, {"alibi_slopes": "H"}),
    "alibi per sequence": (((30, 0, 7), (40, 3, 9), 1, 4, 2, 8, 8), {}, {"alibi_slopes": "SH"}),
    "sinks": (((30, 7), (40, 9), 1, 4, 2, 8, 8), {"window": (5, 0)}, {"sinks": "H"}),
    "dropout": (((30, 7), (40, 9), 1, 2, 1, 8, 8), {"dropout_p": 0.3, "seed": 5}, {}),
    "all at once": (
        ((30, 0, 7), (40, 3, 9), 1, 4, 2, 8, 8),
        {"causal": True, "softcap": 2.0, "dropout_p": 0.1, "seed": 2**40 + 3},
        {"alibi_slopes": "SH", "sinks": "H"},
    ),
}  # fmt: skip
SMALL = ["empty sequences", "rows before and after", "alibi per sequence", "all at once"]


def options_used(case):
    _, options, shapes = CASES[case]
    return ["varlen", *shapes, *(o for o in options if o in ("softcap", "dropout_p"))]


def starts_of(lengths, unused):
    return torch.tensor([unused, *lengths]).cumsum(0).int()


def inputs_of(case, dtype=torch.float32):
    (lengths_q, lengths_k, unused, H, G, D, Dv), _, shapes = CASES[case]
    Tq, Tk = sum(lengths_q) + 2 * unused, sum(lengths_k) + 2 * unused
    sizes = {"q": (Tq, H, D), "k": (Tk, G, D), "v": (Tk, G, Dv)}
    letters = {"H": H, "S": len(lengths_q)}
    sizes |= {n: [letters[c] for c in s] for n, s in shapes.items()}
    tensors = {n: torch.randn(s, dtype=torch.float64).to(dtype) for n, s in sizes.items()}
    return tensors | {
        "cu_seqlens_q": starts_of(lengths_q, unused),
        "cu_seqlens_k": starts_of(lengths_k, unused),
    }


def with_lse(**arguments):
    return tw.flash_attention_varlen(return_lse=True, **arguments)


def one_by_one(call, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes=None, **options):
    """`call` for each sequence, between what the rows of none have."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for n in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        if alibi_slopes is not None:
            options["alibi_slopes"] = alibi_slopes[n] if alibi_slopes.dim() == 2 else alibi_slopes
        parts.append(call(q[None, rows], k[None, keys], v[None, keys], batch=n, **options))

    def nothing(rows):
        like = parts[0][1]
        out = torch.zeros(1, rows, q.shape[1], v.shape[2], dtype=q.dtype)
        return out, torch.full((1, q.shape[1], rows), -INF, dtype=like.dtype)

    parts = [nothing(starts_q[0]), *parts, nothing(q.shape[0] - starts_q[-1])]
    return torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], 1)


TABLE = [
    pytest.param(case, dtype, backend, id=f"{case}-{str(dtype)[6:]}-{backend}")
    for case in CASES
    for backend in backends_taking(*options_used(case))
    for dtype in dtypes_of(backend, every=case in ("causal", "all at once"))
    if backend != "triton" or case in SMALL
]


@pytest.mark.parametrize(("case", "dtype", "backend"), TABLE)
def test_matches_reference(case, dtype, backend):
    expected = functools.partial(one_by_one, reference)
    check_reference(with_lse, expected, inputs_of(case, dtype), CASES[case][1], backend=backend)


@pytest.mark.parametrize("backend", backends_taking("varlen", among=COMPILED))
@pytest.mark.parametrize("case", ["causal", "empty sequences", "window"])
def test_equals_a_loop_over_sequences_bit_for_bit(case, backend):
    inputs, options = inputs_of(case, dtype_for(backend)), CASES[case][1]

    def dense(q, k, v, batch, **options):
        return tw.flash_attention(q, k, v, return_lse=True, backend=backend, **options)

    names = ("q", "k", "v")
    leaves = {n: x.requires_grad_(n in names) for n, x in inputs.items()}
    results = []
    for out, lse in (
        with_lse(**leaves, **options, backend=backend),
        one_by_one(dense, **leaves, **options),
    ):
        total = out.square().sum() + torch.where(lse == -INF, 0.0, lse).sum()
        results.append([out, lse, *torch.autograd.grad(total, [leaves[n] for n in names])])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", backends_taking("varlen", among=COMPILED))
def test_any_layout(backend):
    inputs = inputs_of("rows before and after", dtype_for(backend))
    no_grad = ("cu_seqlens_q", "cu_seqlens_k")
    check_layouts(with_lse, inputs, {"causal": True}, backend=backend, no_grad=no_grad)


@pytest.mark.parametrize(
    ("case", "backend"),
    [(c, b) for c in ("alibi per sequence", "all at once") for b in with_fp64(backends_taking(*options_used(c)))],
)  # fmt: skip
def test_gradcheck(case, backend):
    small = {"q": (4, 2, 2), "k": (5, 1, 2), "v": (5, 1, 2), "alibi_slopes": (3, 2), "sinks": (2,)}
    inputs = {n: torch.rand(small[n]) for n in inputs_of(case) if n in small}
    inputs |= {
        "cu_seqlens_q": torch.tensor([0, 1, 1, 3]),
        "cu_seqlens_k": torch.tensor([0, 2, 3, 5]),
    }

    def op(**arguments):
        out, lse = with_lse(**arguments)
        return out, torch.where(lse == -INF, 0.0, lse)

    check_gradcheck(op, inputs, CASES[case][1], backend=backend)


def test_compiles_without_graph_break():
    no_grad = ("cu_seqlens_q", "cu_seqlens_k")
    check_compile(with_lse, inputs_of("all at once"), CASES["all at once"][1], no_grad=no_grad)


def test_compiled_once_for_any_number_of_tokens_and_checked():
    torch._dynamo.reset()
    compiled = torch.compile(
        tw.flash_attention_varlen, fullgraph=True, backend="aot_eager", dynamic=True
    )
    torch._dynamo.utils.counters.clear()
    for lengths in ((3, 4), (5, 11), (2, 7)):
        starts, x = starts_of(lengths, 0), torch.randn(sum(lengths), 2, 8)
        assert same_bits(
            compiled(x, x, x, starts, starts), tw.flash_attention_varlen(x, x, x, starts, starts)
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with pytest.raises(
        ValueError, match="cu_seqlens_q: expected an end within the 9 rows of q, got 10"
    ):
        compiled(x, x, x, starts + 1, starts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    inputs = inputs_of("all at once", dtype)
    q, k, v = (inputs[n][None] for n in "qkv")
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    starts, extra = (
        (inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]),
        [inputs[n].to(acc) for n in ("alibi_slopes", "sinks")],
    )
    options = (
        *starts,
        extra[0],
        None,
        extra[1],
        torch.tensor([3, 0]),  # seed, first head
        30,
        40,
        0.3,
        -1,
        0,
        False,
        2.0,
        0.1,
    )
    ops = torch.ops.trainwright
    out, lse = ops.flash_attention_fwd_reference(q, k, v, *options)
    check_opcheck(ops.flash_attention_fwd_reference.default, q, k, v, *options)
    arguments = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, *options)
    check_opcheck(
        ops.flash_attention_bwd_reference.default,
        *arguments,
        [True, True, False, True, False, True],
    )
    check_opcheck(ops.checked_cu_seqlens.default, starts[0], q.shape[1], 30, "q")


# ---- reports from the field


@pytest.mark.parametrize("backend", backends_taking("varlen"))
def test_rows_of_no_sequence_give_zero_and_zero_gradients_whatever_they_hold(backend):
    inputs = inputs_of("rows before and after", dtype_for(backend))
    for n in "qkv":
        inputs[n][:4], inputs[n][-4:] = NAN, INF
    leaves = {n: x.requires_grad_(n in "qkv") for n, x in inputs.items()}
    out, lse = with_lse(**leaves, causal=True, backend=backend)
    outside = torch.ones(out.shape[0], dtype=torch.bool)
    outside[4:-4] = False
    assert (out[outside] == 0).all() and (lse[:, outside] == -INF).all()
    assert out[~outside].isfinite().all()
    upstream = torch.where(outside[:, None, None], NAN, torch.ones_like(out))
    for n, g in zip("qkv", torch.autograd.grad(out, [leaves[n] for n in "qkv"], upstream)):
        assert g.isfinite().all() and (g[:4] == 0).all() and (g[-4:] == 0).all(), n


@pytest.mark.parametrize("backend", backends_taking("varlen"))
def test_no_sequences(backend):
    dtype = dtype_for(backend)
    leaves = [torch.randn(6, 2, 8).to(dtype).requires_grad_() for _ in range(3)]
    starts = torch.tensor([3])
    out, lse = tw.flash_attention_varlen(*leaves, starts, starts, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == -INF).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("backend", backends_taking("varlen"))
def test_nan_of_one_sequence_stays_in_it(backend):
    x = torch.randn(12, 1, 8).to(dtype_for(backend))
    x[4] = NAN
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    starts = torch.tensor([0, 4, 7, 12])
    out = tw.flash_attention_varlen(*leaves, starts, starts, backend=backend)
    bad = torch.zeros(12, dtype=torch.bool)
    bad[4:7] = True
    assert out[bad].isnan().all() and out[~bad].isfinite().all()
    for g in torch.autograd.grad(out.sum(), leaves):
        assert g[~bad].isfinite().all()


def test_a_bound_on_the_lengths_changes_nothing():
    inputs = inputs_of("empty sequences")
    plain = with_lse(**inputs, causal=True)
    for options in ({"max_seqlen_q": 100, "max_seqlen_k": 1000}, {"check": False}):
        assert all(
            same_bits(a, b) for a, b in zip(plain, with_lse(**inputs, causal=True, **options))
        )


X, STARTS = torch.ones(6, 4, 8), torch.tensor([0, 2, 6])
NO_START = {"cu_seqlens_q": STARTS[:0], "cu_seqlens_k": STARTS[:0]}
BELOW_0, DECREASING, TOO_LONG = (torch.tensor(x) for x in ([-1, 2, 6], [0, 5, 3], [0, 2, 7]))


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": X[None]}, ValueError, r"q: expected shape \(tokens, heads, head dim\), got \(1, 6, 4, 8\)"),
        ({"v": X[:5]}, ValueError, r"v: expected shape \(6, 4, any\)"),
        ({"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q: expected a torch.Tensor, got list"),
        ({"cu_seqlens_k": STARTS.float()}, TypeError, "cu_seqlens_k: expected dtype int32, int64, got float32"),
        ({"cu_seqlens_q": STARTS[None]}, ValueError, r"cu_seqlens_q: expected shape \(any\)"),
        (NO_START, ValueError, "cu_seqlens_q: expected at least one entry"),
        ({"cu_seqlens_k": STARTS[:2]}, ValueError, r"cu_seqlens_k: expected shape \(3,\), as cu_seqlens_q, got \(2,\)"),
        ({"cu_seqlens_q": BELOW_0}, ValueError, "cu_seqlens_q: expected starts of at least 0, got -1"),
        ({"cu_seqlens_k": DECREASING}, ValueError, "cu_seqlens_k: expected values that do not decrease.* 3 after 5"),
        ({"cu_seqlens_k": TOO_LONG}, ValueError, "cu_seqlens_k: expected an end within the 6 rows of k and v, got 7"),
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: expected at least .*: number 1 has 4 tokens, got 3"),
        ({"max_seqlen_k": 2.0}, TypeError, "max_seqlen_k: expected an int"),
        ({"check": 1}, TypeError, "check: expected a bool"),
        ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes: expected shape \(4,\) or \(2, 4\)"),
        ({"sinks": torch.ones(2)}, ValueError, "sinks: expected shape"),
        ({"window": (0, -2)}, ValueError, "window: expected -1"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changed, error, text):
    arguments = {"q": X, "k": X, "v": X, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, **changed}
    with pytest.raises(error, match=f"flash_attention_varlen: {text}"):
        tw.flash_attention_varlen(**arguments)
