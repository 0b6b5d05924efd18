"""tw.grad_norm and tw.clip_grad_norm_: exact over any mix of dtypes and layouts."""

import math

import pytest
import torch
import trainwright as tw
from numerics import backends_for_tests, check_opcheck, same_bits

BACKENDS = backends_for_tests(tw.grad_norm)


def zoo():
    return [
        torch.randn(7, 33),
        torch.randn(9, 16).t().bfloat16(),
        torch.randn(8, 32).half()[:, ::2],
        torch.randn(5, 1).double().expand(5, 9),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 4),
        torch.randn(20001),
        torch.zeros(3),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [2.0, 1.0, 0.0, math.inf, -math.inf, 3.0, 0.5, "inf"], ids=str)
def test_norm_of_any_mix(p, backend):
    tensors = zoo()
    flat = torch.cat([t.double().flatten() for t in tensors])
    norm = tw.grad_norm(tensors, p, backend=backend)
    assert norm.dtype == torch.float32 and norm.dim() == 0
    expected = torch.linalg.vector_norm(flat, float(p)).item()
    assert norm.item() == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_overflow_and_no_underflow_of_squares(backend):
    for value, dtype in [
        (3e4, torch.float16),
        (1e30, torch.float32),
        (1e-30, torch.float32),
        (6e-8, torch.float16),
    ]:
        x = torch.full((100,), value).to(dtype)
        expected = 10 * x[0].double().item()
        assert tw.grad_norm(x, backend=backend).item() == pytest.approx(expected, rel=1e-6)


def test_many_small_terms_are_not_lost():
    x = torch.full((4_000_000,), 1e-3)
    x[0] = 1000.0
    assert tw.grad_norm([x]).item() == pytest.approx(math.sqrt(1e6 + 4.0), rel=1e-7)
    assert tw.grad_norm([x.bfloat16()], 1.0).item() == pytest.approx(
        x.bfloat16().double().sum().item(), rel=1e-6
    )


def test_same_bits_for_any_thread_count():
    tensors = [torch.randn(n) for n in (100_003, 7, 33_000)]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(tw.ops.grad_norm.__globals__["GRAD_STATS"]["cpu"](tensors, 2.0))
    torch.set_num_threads(2)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf, -math.inf, 3.0])
def test_nan_and_inf_reach_the_norm(p, backend):
    x = torch.ones(100)
    x[37] = math.nan
    assert tw.grad_norm([torch.ones(3), x, torch.ones(3)], p, backend=backend).isnan()
    x[37] = -math.inf
    norm = tw.grad_norm([torch.ones(3), x], p, backend=backend)
    assert norm.item() == (1.0 if p == -math.inf else math.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0, math.inf])
@pytest.mark.parametrize("p", [2.0, math.inf, 1.0])
def test_clips_as_torch(p, max_norm, backend):
    ours = [torch.zeros(t.shape, requires_grad=True) for t in zoo()]
    theirs = [torch.zeros(t.shape, requires_grad=True) for t in zoo()]
    for a, b, g in zip(ours, theirs, zoo()):
        a.grad, b.grad = g.float(), g.float().clone()
    ours.append(torch.zeros(3, requires_grad=True))  # without gradient
    if p == math.inf:  # torch cannot take the largest of nothing
        ours, theirs = ([t for t in x if t.numel()] for x in (ours, theirs))
    norm = tw.clip_grad_norm_(ours, max_norm, p, backend=backend)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, p)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)
        assert a.grad.stride() == b.grad.stride()


@pytest.mark.parametrize("backend", BACKENDS)
def test_clips_strided_gradients_in_place_only(backend):
    base = torch.full((8, 32), 3.0)
    p = torch.zeros(8, 16, requires_grad=True)
    p.grad = base[:, ::2]
    tw.clip_grad_norm_(p, 1.0, backend=backend)
    assert (base[:, 1::2] == 3.0).all() and torch.linalg.vector_norm(base[:, ::2]) <= 1.0


def test_error_if_nonfinite_leaves_gradients_alone():
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.tensor([1.0, math.nan, 2.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        tw.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert p.grad[0] == 1.0
    assert tw.clip_grad_norm_([p], 1.0).isnan() and p.grad.isnan().all()


def test_nothing_to_do():
    assert tw.grad_norm([]).item() == 0 and tw.clip_grad_norm_([torch.ones(2)], 1.0).item() == 0
    assert tw.grad_norm(iter([torch.ones(4)])).item() == 2.0


def test_compiles_without_graph_break_and_opcheck():
    tensors = [torch.randn(4, 3).t(), torch.randn(5).bfloat16()]
    torch._dynamo.reset()
    compiled = torch.compile(tw.grad_norm, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(tensors), tw.grad_norm(tensors))
    check_opcheck(torch.ops.trainwright.grad_stats.default, tensors, 2.0)
    check_opcheck(torch.ops.trainwright.grad_scale_.default, tensors, torch.tensor(0.5).double())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tw.grad_norm([torch.ones(2, dtype=torch.int64)]), TypeError, r"tensors\[0\]: expected dtype"),
        (lambda: tw.grad_norm([1.0]), TypeError, r"tensors\[0\]: expected a torch.Tensor"),
        (lambda: tw.grad_norm([torch.ones(2)], None), TypeError, "norm_type: expected a number"),
        (lambda: tw.clip_grad_norm_([torch.ones(2)], "1"), TypeError, "max_norm: expected a number"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()
