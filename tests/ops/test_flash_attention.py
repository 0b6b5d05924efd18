"""tw.flash_attention: one table of cases for every backend."""

import functools
import math

import pytest
import torch
import trainwright as tw
from attention_cases import (
    BACKENDS,
    CASES,
    COMPILED,
    DTYPES,
    INF,
    INTERPRETED,
    INTERPRETED_BF16,
    NAN,
    OPTIONS,
    backends_taking,
    dtype_for,
    dtypes_of,
    option_inputs,
    options_used,
    qkv,
    reference,
    with_fp64,
    with_lse,
)
from numerics import (
    check_compile,
    check_gradcheck,
    check_layouts,
    check_opcheck,
    check_reference,
    same_bits,
)

TABLE = [
    pytest.param(case, dtype, backend, id=f"{case}-{str(dtype)[6:]}-{backend}")
    for backend in BACKENDS
    for case in (CASES if backend != "triton" else INTERPRETED)
    for dtype in dtypes_of(backend)
] + [
    pytest.param(case, torch.bfloat16, "triton", id=f"{case}-bfloat16-triton")
    for case in INTERPRETED_BF16
    if "triton" in BACKENDS
]


@pytest.mark.parametrize(("case", "dtype", "backend"), TABLE)
def test_matches_reference(case, dtype, backend):
    shape, options = CASES[case]
    check_reference(with_lse, reference, qkv(*shape, dtype), options, backend=backend)


OPTION_TABLE = [
    pytest.param(case, dtype, backend, id=f"{case}-{str(dtype)[6:]}-{backend}")
    for case in OPTIONS
    for backend in backends_taking(*options_used(case))
    for dtype in dtypes_of(backend, every=case == "all at once")
]


@pytest.mark.parametrize(("case", "dtype", "backend"), OPTION_TABLE)
def test_every_option_matches_reference(case, dtype, backend):
    # More than one block of queries and of keys, with tails.
    shape = (2, 70, 75, 4, 2, 16, 24) if backend != "triton" else (2, 19, 35, 2, 1, 8, 8)
    inputs = option_inputs(case, *shape, dtype)
    check_reference(with_lse, reference, inputs, OPTIONS[case][0], backend=backend)


@pytest.mark.parametrize(
    "backend", backends_taking("alibi_slopes", "bias", "sinks", among=COMPILED)
)
def test_any_layout_of_the_options(backend):
    inputs = option_inputs("all at once", 2, 9, 11, 4, 2, 8, 8, dtype_for(backend))
    check_layouts(with_lse, inputs, OPTIONS["all at once"][0], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout(backend):
    shape = (2, 19, 21, 4, 2, 8, 8) if backend != "triton" else (1, 9, 10, 2, 1, 8, 8)
    check_layouts(with_lse, qkv(*shape, dtype_for(backend)), {"causal": True}, backend=backend)


@pytest.mark.parametrize("backend", COMPILED)
def test_views_of_a_fused_projection(backend):
    x = torch.randn(2, 40, 3, 4, 16).to(dtype_for(backend)).requires_grad_()
    out = tw.flash_attention(*x.unbind(2), causal=True, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), x)
    parts = [t.detach().contiguous().requires_grad_() for t in x.unbind(2)]
    out_ = tw.flash_attention(*parts, causal=True, backend=backend)
    grads = torch.autograd.grad(out_.sum(), parts)
    assert same_bits(out, out_) and same_bits(grad, torch.stack(grads, 2))


@pytest.mark.parametrize("backend", with_fp64(COMPILED))
@pytest.mark.parametrize(
    "case", ["causal", "bottom-right, more queries", "window both sides", "grouped heads"]
)
def test_gradcheck(case, backend):
    (_, _, _, H, G, _, _), options = CASES[case]
    inputs = qkv(1, 7 if "queries" not in case else 9, 5, H, G, 3, 2)
    options = {**options, "window": (1, 2)} if "window" in options else options

    def op(**arguments):
        out, lse = with_lse(**arguments)
        return out, torch.where(lse == -INF, 0.0, lse)

    check_gradcheck(op, inputs, options, backend=backend)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (c, b)
        for c in OPTIONS
        for b in with_fp64(backends_taking(*options_used(c)))
        if b != "torch" or c in ("all at once", "bias, broadcast over heads and keys")
    ],
)  # fmt: skip
def test_gradcheck_of_every_option(case, backend):
    inputs = option_inputs(
        case, 2, 3, 4, 2, 1, 2, 2
    )  # numeric gradients cost two calls per element
    check_gradcheck(with_lse, inputs, OPTIONS[case][0], backend=backend)


@pytest.mark.parametrize("case", ["causal", "window both sides", "grouped heads"])
def test_compiles_without_graph_break(case):
    shape, options = CASES[case]
    check_compile(with_lse, qkv(*shape, torch.bfloat16), options)


def test_compiles_without_gradients_once_for_any_length():
    torch._dynamo.reset()
    compiled = torch.compile(with_lse, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for T in (5, 9, 14):
        x = torch.randn(2, T, 2, 8)
        assert same_bits(
            compiled(q=x, k=x, v=x, causal=True)[0], with_lse(q=x, k=x, v=x, causal=True)[0]
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiles_with_every_option():
    check_compile(
        with_lse, option_inputs("all at once", 2, 9, 11, 4, 2, 8, 6), OPTIONS["all at once"][0]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    q, k, v = qkv(2, 5, 7, 4, 2, 8, 6, dtype).values()
    options = (*[None] * 6, 0, 0, 0.3, 2, 0, False, 0.0, 0.0)
    out, lse = torch.ops.trainwright.flash_attention_fwd(q, k, v, *options)
    by_head = q.transpose(1, 2).contiguous().transpose(1, 2)
    check_opcheck(torch.ops.trainwright.flash_attention_fwd.default, by_head, k, v, *options)
    for need in ([True, True, True], [False, True, False]):
        arguments = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, *options)
        op = torch.ops.trainwright.flash_attention_bwd.default
        check_opcheck(op, *arguments, need + [False] * 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    inputs = qkv(1, 300, 300, 3, 1, 24, 24, dtype)
    results = []
    for threads in (1, 2, 4):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
            out, lse = with_lse(**leaves, causal=True)
            total = (out * out).sum() + lse.sum()
            results.append([out, lse, *torch.autograd.grad(total, leaves.values())])
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other))


# ---- reports from the field


@pytest.mark.parametrize("backend", BACKENDS)
def test_alignment_is_flash_attention_s_by_default_and_torch_s_on_request(backend):
    dtype = dtype_for(backend)
    q, k, v = qkv(1, 2, 3, 1, 1, 4, 4, dtype).values()
    v[0, :, 0, 0] = torch.tensor([1.0, 2.0, 4.0])
    q.zero_()
    bottom = tw.flash_attention(q, k, v, causal=True, backend=backend)[0, :, 0, 0]
    top = tw.flash_attention(q, k, v, causal=True, causal_align="top-left", backend=backend)
    torch.testing.assert_close(bottom, torch.tensor([1.5, 7.0 / 3]).to(dtype))
    torch.testing.assert_close(top[0, :, 0, 0], torch.tensor([1.0, 1.5]).to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fully_masked_rows_give_zero_lse_minus_inf_and_zero_gradients(backend):
    leaves = {
        n: x.requires_grad_() for n, x in qkv(1, 6, 2, 2, 1, 8, 8, dtype_for(backend)).items()
    }
    out, lse = with_lse(**leaves, causal=True, backend=backend)
    assert (out[:, :4] == 0).all() and (lse[..., :4] == -INF).all()
    assert lse[..., 4:].isfinite().all()
    upstream = torch.ones_like(out)
    upstream[:, :4] = NAN  # nothing came from there, so nothing goes back
    dq, dk, dv = torch.autograd.grad([out, lse], leaves.values(), [upstream, torch.ones_like(lse)])
    assert (dq[:, :4] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


@pytest.mark.parametrize("backend", backends_taking("bias"))
def test_a_row_of_finfo_min_is_uniform_not_nan(backend):
    q, k, v = qkv(1, 3, 5, 1, 1, 8, 8, dtype_for(backend)).values()
    bias = torch.zeros(3, 5)
    bias[1] = torch.finfo(torch.float32).min
    out = tw.flash_attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(out[0, 1, 0], v[0, :, 0].float().mean(0).to(v.dtype))
    bias[1] = -INF
    assert (tw.flash_attention(q, k, v, bias=bias, backend=backend)[0, 1] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_in_masked_slots_reach_nothing(backend, bad):
    inputs = qkv(1, 14, 20, 2, 1, 8, 8, dtype_for(backend))
    dirty = {n: x.clone() for n, x in inputs.items()}
    for slot in (9, 17):  # only queries 9 .. 13 see the first, no query sees the second
        dirty["k"][:, slot, :, 3], dirty["v"][:, slot, :, 5] = bad, bad
    results = []
    for values in (inputs, dirty):
        leaves = {n: x.clone().requires_grad_() for n, x in values.items()}
        out = tw.flash_attention(**leaves, causal=True, causal_align="top-left", backend=backend)
        dq, dk, dv = torch.autograd.grad(out.sum(), leaves.values())
        results.append((out[:, :9], dq[:, :9], dk[:, 14:], dv[:, 14:]))
    for clean, other in zip(*results):
        torch.testing.assert_close(other, clean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_reaches_exactly_the_rows_that_see_it(backend):
    q, k, v = qkv(1, 20, 20, 1, 1, 8, 8, dtype_for(backend)).values()
    v[0, 13, 0, 5] = NAN
    out = tw.flash_attention(q, k, v, causal=True, backend=backend)
    assert out[0, 13:, 0, 5].isnan().all() and int(out.isnan().sum()) == 7
    q[0, 4, 0, 0] = NAN
    out = tw.flash_attention(q, k, v, causal=True, backend=backend)
    assert out[0, 4].isnan().all() and int(out.isnan().sum()) == 7 + 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_nan_reaches_only_the_keys_that_its_query_sees(backend):
    inputs = qkv(1, 20, 20, 1, 1, 8, 8, dtype_for(backend))
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    out = tw.flash_attention(**leaves, causal=True, backend=backend)
    upstream = torch.ones_like(out)
    upstream[0, 6, 0, 2] = NAN
    dq, dk, dv = torch.autograd.grad(out, leaves.values(), upstream)
    assert dq[0, 6].isnan().all() and int(dq.isnan().sum()) == 8
    assert dk[0, :7].isnan().all() and not dk[0, 7:].isnan().any()
    assert dv[0, :7, 0, 2].isnan().all() and int(dv.isnan().sum()) == 7


@pytest.mark.parametrize("backend", COMPILED)
def test_default_scale_uses_the_head_dim_given(backend):
    q, k, v = qkv(1, 9, 9, 1, 1, 40, 40, dtype_for(backend)).values()
    a = tw.flash_attention(q, k, v, backend=backend)
    assert same_bits(a, tw.flash_attention(q, k, v, scale=1 / math.sqrt(40), backend=backend))


@pytest.mark.parametrize("backend", with_fp64(COMPILED))
def test_gradient_through_lse_alone(backend):
    leaves = {n: x.double().requires_grad_() for n, x in qkv(1, 6, 6, 2, 1, 4, 4).items()}
    _, lse = with_lse(**leaves, causal=True, backend=backend)
    ours = torch.autograd.grad(lse.square().sum(), leaves.values())
    exact = torch.autograd.grad(
        reference(**leaves, causal=True)[1].square().sum(), leaves.values(), allow_unused=True
    )
    torch.testing.assert_close(ours[:2], exact[:2])
    assert (ours[2] == 0).all()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_gradients_asked_for(backend, wanted):
    inputs = qkv(1, 9, 9, 2, 1, 8, 8, dtype_for(backend))
    every = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    out = tw.flash_attention(**every, causal=True, backend=backend)
    full = dict(zip("qkv", torch.autograd.grad(out.sum(), every.values())))
    some = {n: x.clone().requires_grad_(n in wanted) for n, x in inputs.items()}
    tw.flash_attention(**some, causal=True, backend=backend).sum().backward()
    for n, x in some.items():
        assert (x.grad is None) == (n not in wanted)
        assert x.grad is None or same_bits(x.grad, full[n])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_inputs_and_returns_gradients_in_fp32(dtype):
    leaves = {n: x.requires_grad_() for n, x in qkv(1, 9, 9, 2, 1, 8, 8).items()}
    with torch.autocast("cpu", dtype=dtype):
        out = tw.flash_attention(**leaves, causal=True)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().sum(), leaves.values())
    assert all(g.dtype == torch.float32 for g in grads)
    plain = tw.flash_attention(**{n: x.to(dtype) for n, x in leaves.items()}, causal=True)
    assert same_bits(out, plain)


@pytest.mark.parametrize("backend", COMPILED)
def test_window_wider_than_the_sequence_is_causal(backend):
    q, k, v = qkv(1, 80, 80, 1, 1, 8, 8, dtype_for(backend)).values()
    attend = functools.partial(tw.flash_attention, q, k, v, backend=backend)
    causal = attend(causal=True)
    for window in ((80, -1), (-1, 5), (10**12, 0)):
        assert same_bits(causal, attend(causal=True, window=window))
    assert same_bits(attend(), attend(window=(10**12, 10**15)))


@pytest.mark.parametrize("backend", COMPILED)
def test_large_scores_do_not_overflow(backend):
    inputs = qkv(1, 70, 70, 1, 1, 64, 64, dtype_for(backend))
    large = {n: 4 * x for n, x in inputs.items()}
    check_reference(with_lse, reference, large, {"causal": True}, backend=backend)
    # The gradients come from lse, which holds a score of 10^4 to 10^-3 only; the outputs do not.
    inputs = {n: 60 * x for n, x in inputs.items()}
    no_grad = ("q", "k", "v")
    check_reference(with_lse, reference, inputs, {"causal": True}, no_grad=no_grad, backend=backend)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    out = tw.flash_attention(**leaves, causal=True, backend=backend)
    grads = torch.autograd.grad(out.sum(), leaves.values())
    assert all(g.isfinite().all() for g in grads)


# ---- dropout


DROPPING = backends_taking("dropout_p", among=COMPILED)
EXACT_DROPPING = [b for b in DROPPING if dtype_for(b) == torch.float32]


@pytest.mark.parametrize("backend", EXACT_DROPPING)  # 16 bits do not hold how many are kept
def test_dropout_keeps_what_it_says_and_is_unbiased(backend):
    q, v = torch.zeros(2, 64, 3, 4), torch.ones(2, 500, 3, 1)
    k = torch.zeros(2, 500, 3, 4)
    out = tw.flash_attention(q, k, v, dropout_p=0.3, seed=5, backend=backend)
    assert abs(out.mean().item() - 1.0) < 5 * math.sqrt(0.3 / 0.7 / (2 * 64 * 500 * 3))
    kept = out * 0.7 * 500  # number of keys kept by each query
    torch.testing.assert_close(kept, kept.round(), atol=1e-3, rtol=0)
    assert abs(kept.std().item() / math.sqrt(500 * 0.3 * 0.7) - 1) < 0.2


@pytest.mark.parametrize("backend", DROPPING)
def test_dropout_depends_on_seed_and_position_alone(backend):
    q, k, v = qkv(2, 30, 41, 4, 2, 8, 8, dtype_for(backend)).values()
    drop = functools.partial(tw.flash_attention, dropout_p=0.5, backend=backend)
    out = drop(q, k, v, seed=11)
    assert same_bits(out, drop(q, k, v, seed=11))
    assert not torch.equal(out, drop(q, k, v, seed=12))
    torch.testing.assert_close(drop(q[:, :7], k, v, seed=11), out[:, :7])
    torch.manual_seed(3)
    a, b = (drop(q, k, v) for _ in range(2))
    torch.manual_seed(3)
    assert same_bits(a, drop(q, k, v)) and not torch.equal(a, b)


@pytest.mark.parametrize("backend", DROPPING)
@pytest.mark.parametrize("varlen", [False, True])
def test_dropout_of_a_rank_s_heads_is_that_of_the_whole(backend, varlen):
    """Heads split unevenly, as by tensor parallel: out and gradients are those of the same heads of one call."""
    x = qkv(1 if varlen else 2, 30, 30, 6, 2, 8, 8, dtype_for(backend))
    whole = {n: t.detach().clone().requires_grad_() for n, t in x.items()}

    def drop(q, k, v, first):
        options = {"dropout_p": 0.5, "seed": 11, "first_head": first, "backend": backend}
        if not varlen:
            return tw.flash_attention(q, k, v, **options)
        starts = torch.tensor([0, 13, 30])
        return tw.flash_attention_varlen(q[0], k[0], v[0], starts, starts, **options)[None]

    drop(**whole, first=0).square().sum().backward()
    for heads, groups in ((slice(0, 3), slice(0, 1)), (slice(3, 6), slice(1, 2))):
        part = {n: t[:, :, heads if n == "q" else groups].detach() for n, t in x.items()}
        part = {n: t.requires_grad_() for n, t in part.items()}
        out = drop(**part, first=heads.start)
        out.square().sum().backward()
        torch.testing.assert_close(out, drop(**whole, first=0)[:, :, heads])
        for n, t in part.items():
            whole_grad = whole[n].grad[:, :, heads if n == "q" else groups]
            torch.testing.assert_close(t.grad, whole_grad)
    unlike = drop(**{n: t[:, :, -1:] for n, t in x.items()}, first=0)
    assert not torch.equal(unlike, drop(**x, first=0)[:, :, -1:])


def test_dropout_mask_is_philox_by_coordinates():
    host = pytest.importorskip("trainwright._host")
    from trainwright.ops._attention import seed_tensor
    from trainwright.ops._attention_reference import uniform_bits

    seed = (123 << 40) + 7
    bits = uniform_bits(seed_tensor(seed, 0, torch.device("cpu"))[0], 2, 3, 4, 6)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 5), (1, 0, 2, 4)):
        assert bits[b, h, i, j] == host.philox(seed, j // 4 + (i << 32), h + (b << 32))[j % 4]


@pytest.mark.parametrize("backend", backends_taking("dropout_p"))
def test_dropout_of_everything_is_zero(backend):
    inputs = qkv(1, 5, 6, 2, 1, 8, 8, dtype_for(backend))
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    out, lse = with_lse(**leaves, dropout_p=1.0, backend=backend)
    assert (out == 0).all() and lse.isfinite().all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves.values()))


# ---- choice of backend and arguments


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels")
def test_every_option_runs_on_the_cpu_kernels():
    x = torch.randn(1, 4, 1, 8)
    one = torch.ones(1)
    text = tw.explain(
        tw.flash_attention, x, x, x, causal=True, window=(2, 0), softcap=2.0, alibi_slopes=one, bias=one, sinks=one,
        dropout_p=0.5,
    )  # fmt: skip
    assert "cpu: chosen" in text


@pytest.mark.parametrize("case", OPTIONS)
def test_the_first_backend_that_takes_the_options_runs_and_explain_says_so(case):
    inputs, options = option_inputs(case, 1, 4, 5, 2, 1, 8, 8), OPTIONS[case][0]
    used = options_used(case)
    text = tw.explain(tw.flash_attention, **inputs, **options)
    able = [b for b in ("cpu", "torch") if b in backends_taking(*used)]
    assert f"  {able[0]}: chosen" in text.splitlines()
    for backend in set(BACKENDS) - {"vgpu"} - set(backends_taking(*used)):
        with pytest.raises(tw.BackendError, match=f"{backend}: does not implement"):
            tw.flash_attention(**inputs, **options, backend=backend)


def test_strict_mode_never_ends_at_the_torch_reference(monkeypatch):
    monkeypatch.setenv("TRAINWRIGHT_STRICT", "1")
    wide = torch.randn(1, 4, 1, 513)
    with pytest.raises(tw.BackendError, match="needs D <= 512, got 513"):
        tw.flash_attention(wide, wide, wide)


X = torch.ones(2, 3, 4, 8)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": [1.0]}, TypeError, "flash_attention: q: expected a torch.Tensor, got list"),
        ({"q": X[0]}, ValueError, r"q: expected shape \(B, T, heads, head dim\), got \(3, 4, 8\)"),
        ({"k": X.double()}, TypeError, "k: expected dtype float32, got float64"),
        ({"k": X[..., :7]}, ValueError, r"k: expected shape \(2, any, any, 8\)"),
        ({"v": X[:, :2]}, ValueError, r"v: expected shape \(2, 3, 4, any\)"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, ValueError, "k: expected a number of heads that divides q's 4, got 3"),
        ({"causal": 1}, TypeError, "causal: expected a bool"),
        ({"causal_align": "left"}, ValueError, "causal_align: expected 'bottom-right' or 'top-left'"),
        ({"scale": NAN}, ValueError, "scale: expected a finite number"),
        ({"scale": "1"}, TypeError, "scale: expected a number"),
        ({"window": (-2, 0)}, ValueError, "window: expected -1"),
        ({"window": 3}, TypeError, "window: expected None or"),
        ({"window": (1.5, 0)}, TypeError, "window: expected two ints"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a number above 0, got 0.0"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p: expected a probability"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a probability"),
        ({"seed": 0.5}, TypeError, "seed: expected None or an int"),
        ({"first_head": -1}, ValueError, "first_head: expected at least 0, got -1"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes: expected shape"),
        ({"bias": torch.ones(3, 4)}, ValueError, "bias: expected a shape that broadcasts to"),
        ({"sinks": torch.ones(3)}, ValueError, "sinks: expected shape"),
        ({"deterministic": 1}, TypeError, "deterministic: expected a bool"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of"),
        ({"backend": "cuda"}, tw.BackendError, "cuda: needs CUDA tensors, got cpu"),
        ({"q": torch.ones(2, 3, 4, 513), "k": torch.ones(2, 3, 4, 513)}, tw.BackendError, "needs D <= 512, got 513"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changed, error, text):
    with pytest.raises(error, match=text):
        tw.flash_attention(**{"q": X, "k": X, "v": X, **changed})
