"""What users of attention libraries reported, as cases: options, for every backend that takes them."""

import functools

import pytest
import torch
import trainwright as tw
from attention_cases import (
    COMPILED,
    FP32,
    FP32_COMPILED,
    INF,
    NAN,
    OPTIONS,
    backends_taking,
    dtype_for,
    option_inputs,
    qkv,
    reference,
    with_fp64,
    with_lse,
)
from numerics import attention_close, check_reference, same_bits

SHAPE = (1, 14, 20, 2, 1, 8, 8)


@pytest.mark.parametrize("backend", backends_taking("bias", among=FP32))
def test_nan_behind_a_bias_of_minus_inf_reaches_nothing(backend):
    bias = torch.zeros(14, 20)
    bias[:, 17] = -INF  # no query sees key 17,
    bias[:9, 5] = -INF  # only the last five see key 5
    results = []
    for bad in (0.0, NAN, INF):
        leaves = qkv(*SHAPE)
        leaves["k"][:, [5, 17], :, 3], leaves["v"][:, [5, 17], :, 2] = bad, bad
        torch.manual_seed(0)
        leaves = {n: x.requires_grad_() for n, x in leaves.items()}
        out = tw.flash_attention(**leaves, bias=bias, backend=backend)
        upstream = torch.ones_like(out)
        upstream[:, 9:] = 0.0
        dq, dk, dv = torch.autograd.grad(out, leaves.values(), upstream)
        results.append((out[:, :9], dq[:, :9], dk[:, 17], dv[:, 17]))
    for other in results[1:]:
        for clean, dirty in zip(results[0], other):
            assert attention_close("beside unseen NaN", dirty, clean)


@pytest.mark.parametrize("backend", backends_taking("sinks", among=FP32))
@pytest.mark.parametrize("dirty", ["q", "k", "v", "dout", "dlse"])
def test_nan_and_inf_reach_no_pair_that_a_mask_leaves_out(backend, dirty):
    """Query or key 4 of 9 is bad; a window of three keys, so it meets queries 4 to 6 or keys 2 to 4 only."""
    inputs = qkv(1, 9, 9, 2, 1, 8, 8) | {"sinks": torch.tensor([0.3, -1.0])}
    inputs |= {"dout": torch.randn(1, 9, 2, 8), "dlse": torch.randn(1, 2, 9)}
    rows, keys = [0, 1, 2, 3, 7, 8], [0, 1, 7, 8]
    if dirty not in "kv":
        rows, keys = [0, 1, 2, 3, 5, 6, 7, 8], [0, 1, 5, 6, 7, 8]
    results = []
    for bad in (0.0, NAN, INF):
        x = {n: t.clone() for n, t in inputs.items()}
        if dirty == "dlse":
            x["dlse"][:, 0, 4] = bad
        else:
            x[dirty][:, 4, 0, 3] = bad
        upstream = [x.pop("dout"), x.pop("dlse")]
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        outs = with_lse(**leaves, causal=True, window=(2, 0), backend=backend)
        dq, dk, dv, _ = torch.autograd.grad(outs, list(leaves.values()), upstream)
        parts = (outs[0], rows), (outs[1].transpose(1, 2), rows), (dq, rows), (dk, keys), (dv, keys)
        results.append([x.detach()[:, at] for x, at in parts])
    for other in results[1:]:
        for clean, got in zip(results[0], other):
            assert attention_close("beside unseen NaN", got, clean)


@pytest.mark.parametrize("backend", backends_taking("bias", among=FP32_COMPILED))
@pytest.mark.parametrize("shape", [(14, 20), (2, 1, 20), (1, 1, 14, 1), (20,), (1,)], ids=str)
def test_only_the_bias_wants_a_gradient_and_broadcast_dims_are_summed(backend, shape):
    inputs = qkv(*SHAPE, torch.float32)
    bias = torch.randn(shape, requires_grad=True)
    (got,) = torch.autograd.grad(
        tw.flash_attention(**inputs, bias=bias, causal=True, backend=backend).square().sum(), bias
    )
    full = bias.detach().expand(1, 2, 14, 20).clone().requires_grad_()
    (every,) = torch.autograd.grad(
        tw.flash_attention(**inputs, bias=full, causal=True, backend=backend).square().sum(), full
    )
    torch.testing.assert_close(got, every.sum_to_size(shape))


@pytest.mark.parametrize(
    "backend", backends_taking("alibi_slopes", "bias", "sinks", among=FP32_COMPILED)
)
@pytest.mark.parametrize("wanted", ["alibi_slopes", "bias", "sinks", "q", "v"])
def test_only_the_gradients_asked_for(backend, wanted):
    inputs, options = option_inputs("all at once", *SHAPE), OPTIONS["all at once"][0]
    options = {n: x for n, x in options.items() if n not in ("dropout_p", "seed")}
    every = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    with_lse(**every, **options, backend=backend)[0].square().sum().backward()
    one = {n: x.clone().requires_grad_(n == wanted) for n, x in inputs.items()}
    with_lse(**one, **options, backend=backend)[0].square().sum().backward()
    assert all((x.grad is None) == (n != wanted) for n, x in one.items())
    assert same_bits(one[wanted].grad, every[wanted].grad)


@pytest.mark.parametrize("backend", backends_taking("sinks", among=FP32))
def test_a_sink_takes_its_share_of_the_output_and_none_of_lse(backend):
    inputs = qkv(*SHAPE)
    plain, lse = with_lse(**inputs, causal=True, causal_align="top-left", backend=backend)
    for sink, share in ((-INF, 1.0), (-1e9, 1.0), (1e9, 0.0)):
        sinks = torch.full((2,), sink, requires_grad=True)
        out, same = with_lse(
            **inputs, causal=True, causal_align="top-left", sinks=sinks, backend=backend
        )
        torch.testing.assert_close(out, share * plain)
        torch.testing.assert_close(same, lse)
        assert (torch.autograd.grad(out.sum(), sinks)[0] == 0).all()


@pytest.mark.parametrize("backend", backends_taking("sinks", among=FP32))
def test_queries_without_keys_give_zero_with_sinks_too(backend):
    leaves = {n: x.requires_grad_() for n, x in qkv(1, 6, 2, 2, 1, 8, 8).items()}
    sinks = torch.zeros(2, requires_grad=True)
    out, lse = with_lse(**leaves, sinks=sinks, causal=True, backend=backend)
    assert (out[:, :4] == 0).all() and (lse[..., :4] == -INF).all()
    upstream = torch.ones_like(out)
    upstream[:, :4] = NAN
    grads = torch.autograd.grad(out, [*leaves.values(), sinks], upstream)
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :4] == 0).all()


@pytest.mark.parametrize("backend", backends_taking("softcap", among=FP32_COMPILED))
def test_softcap_of_huge_scores_saturates_with_finite_gradients(backend):
    leaves = {n: (1e3 * x).requires_grad_() for n, x in qkv(*SHAPE).items()}
    out = tw.flash_attention(**leaves, softcap=5.0, causal=True, backend=backend)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves.values()))


@pytest.mark.parametrize("backend", backends_taking("softcap", "dropout_p", among=FP32_COMPILED))
def test_softcap_with_dropout(backend):
    options = {"softcap": 1.5, "dropout_p": 0.25, "seed": 3, "causal": True}
    check_reference(with_lse, reference, qkv(1, 70, 75, 2, 1, 16, 16), options, backend=backend)


@pytest.mark.parametrize("backend", FP32_COMPILED)
def test_a_window_counts_the_keys_to_either_side_inclusively(backend):
    q, k = torch.zeros(1, 20, 1, 4), torch.zeros(1, 20, 1, 4)
    v = torch.eye(20).view(1, 20, 1, 20)
    for left, right in ((0, 0), (3, 0), (2, 5), (-1, 1)):
        seen = tw.flash_attention(q, k, v, window=(left, right), backend=backend)[0, :, 0] > 0
        at = torch.arange(20)
        ahead = at - at[:, None]
        assert torch.equal(seen, (ahead <= right) & ((ahead >= -left) | (left < 0)))


@pytest.mark.parametrize("backend", backends_taking("alibi_slopes", among=FP32_COMPILED))
def test_alibi_of_part_of_the_heads_is_that_part(backend):
    inputs = option_inputs("alibi per batch and head", 2, 9, 12, 4, 4, 8, 8)
    whole = tw.flash_attention(**inputs, backend=backend)
    part = {n: x[:, 2:] if n == "alibi_slopes" else x[:, :, 2:] for n, x in inputs.items()}
    assert same_bits(tw.flash_attention(**part, backend=backend), whole[:, :, 2:].contiguous())


@pytest.mark.parametrize("backend", backends_taking("dropout_p", among=FP32_COMPILED))
def test_checkpointing_recomputes_with_the_same_dropout(backend):
    leaves = [x.requires_grad_() for x in qkv(*SHAPE).values()]
    drop = functools.partial(tw.flash_attention, dropout_p=0.4, causal=True, backend=backend)
    results = []
    for call in (
        drop,
        functools.partial(torch.utils.checkpoint.checkpoint, drop, use_reentrant=False),
    ):
        torch.manual_seed(9)
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(same_bits(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("backend", with_fp64(backends_taking("dropout_p", among=FP32_COMPILED)))
def test_every_backend_drops_the_same_pairs(backend):
    q, k, v = qkv(2, 70, 75, 4, 2, 16, 16, torch.float64).values()
    options = {"dropout_p": 0.37, "seed": -12345, "causal": True}
    ours, exact = (tw.flash_attention(q, k, v, **options, backend=b) for b in (backend, "torch"))
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("backend", FP32_COMPILED)
def test_one_tensor_as_query_key_and_value(backend):
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    out = tw.flash_attention(x, x, x, causal=True, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), x)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    grads = torch.autograd.grad(
        tw.flash_attention(*parts, causal=True, backend=backend).sum(), parts
    )
    torch.testing.assert_close(grad, sum(grads))


# flash-attn's own sweep, thinned: head dims and lengths in turn, all of it with `make test-full`.
DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
LENGTHS = [
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (256, 256),
    (255, 256),
    (256, 255),
]
HEADS = {"mha": (2, 2), "mqa": (2, 1), "gqa": (4, 2)}
VARIANTS = {
    "full": {}, "causal": {"causal": True}, "local": {"window": (30, 17)},
    "causal local": {"causal": True, "window": (50, 0)},
    "softcap": {"causal": True, "softcap": 50.0}, "dropout": {"dropout_p": 0.17, "seed": 1},
}  # fmt: skip


def sweep():
    """Each head dim once per variant, lengths and heads cycling; one in seven of them without the slow mark."""
    n = 0
    for D in DIMS:
        for variant, options in VARIANTS.items():
            lengths, heads = LENGTHS[n % len(LENGTHS)], list(HEADS)[n % len(HEADS)]
            slow = () if n % 7 == 0 else (pytest.mark.slow,)
            used = [o for o in ("softcap", "dropout_p") if o in options]
            for backend in backends_taking(*used, among=[b for b in COMPILED if b != "torch"]):
                name = f"{D}-{variant}-{lengths[0]}x{lengths[1]}-{heads}-{backend}"
                marks = (pytest.mark.slow,) if backend == "vgpu" else slow
                shape = (1, *lengths, *HEADS[heads], D, D)
                yield pytest.param(shape, options, backend, id=name, marks=marks)
            n += 1


@pytest.mark.parametrize(("shape", "options", "backend"), list(sweep()))
def test_sweep(shape, options, backend):
    dtype = torch.bfloat16 if shape[1] % 2 else dtype_for(backend)
    check_reference(with_lse, reference, qkv(*shape, dtype), options, backend=backend)
