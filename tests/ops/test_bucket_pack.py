"""tw.bucket_pack, tw.bucket_unpack, tw.ordered_sum: exact against a plain loop, for every dtype pair and layout."""

import itertools

import pytest
import torch
import trainwright as tw
from numerics import backends_for_tests, check_opcheck, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAIRS = list(itertools.product(DTYPES, DTYPES))
BACKENDS = backends_for_tests(tw.bucket_pack)


def zoo(dtype):
    """Gradients of the layouts that training produces; integers / 64, so that sums are exact in fp32."""

    def numbers(*shape):
        return (torch.randint(-64, 64, shape) / 64).to(dtype)

    return {
        "contiguous": numbers(7, 33),
        "none": None,
        "transposed": numbers(9, 16).t(),
        "every second column": numbers(8, 32)[:, ::2],
        "offset view": numbers(300)[3:260],
        "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": numbers(1).expand(31),
        "expanded rows": numbers(5, 1).expand(5, 9),
        "reversed by flip of dims": numbers(3, 4, 5).permute(2, 0, 1),
        "0-dim": numbers(),
        "no elements": numbers(0, 4),
        "empty and strided": numbers(4, 0).t(),
        "more than a block": numbers(16385 + 7),
        "transposed, more than a run": numbers(41, 129).t(),
    }


def slots_of(grads, padding=0):
    offsets, at = [], 3
    for g in grads:
        offsets.append(at)
        at += (10 if g is None else g.numel()) + padding
    return offsets, at


def packed(grads, flat, offsets, scale, accumulate):
    """What bucket_pack must leave in `flat`, element by element in the wider of the two dtypes."""
    flat = flat.clone()
    for i, (g, begin) in enumerate(zip(grads, offsets)):
        end = offsets[i + 1] if i + 1 < len(offsets) else flat.numel()
        before = flat[begin:end].clone()
        if not accumulate:
            flat[begin:end] = 0
        if g is not None:
            wide = torch.promote_types(torch.promote_types(g.dtype, flat.dtype), torch.float32)
            value = g.flatten().to(wide) * scale
            if accumulate:
                value = value + before[: g.numel()].to(wide)
            flat[begin : begin + g.numel()] = value.to(flat.dtype)
    return flat


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulate", [False, True], ids=["copy", "add"])
@pytest.mark.parametrize(("flat_dtype", "grad_dtype"), PAIRS, ids=lambda d: str(d)[6:])
def test_pack_every_layout_and_dtype(flat_dtype, grad_dtype, accumulate, backend):
    grads = list(zoo(grad_dtype).values())
    offsets, size = slots_of(grads, padding=5)
    flat = (torch.randint(-64, 64, (size,)) / 64).to(flat_dtype)
    before = [None if g is None else g.clone() for g in grads]
    expected = packed(grads, flat, offsets, 0.5, accumulate)
    squares, nonfinite = tw.bucket_pack(
        grads, flat, offsets, scale=0.5, accumulate=accumulate, backend=backend
    )
    assert same_bits(flat, expected)
    exact = sum(
        flat[o : o + g.numel()].double().square().sum() for g, o in zip(grads, offsets) if g is not None
    )  # fmt: skip
    assert squares.item() == pytest.approx(exact.item(), rel=1e-12) and nonfinite.item() == 0
    assert squares.dtype == nonfinite.dtype == torch.float64 and squares.dim() == 0
    assert all(g is None or same_bits(g, b) for g, b in zip(grads, before))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("flat_dtype", "out_dtype"), PAIRS, ids=lambda d: str(d)[6:])
def test_unpack_every_layout_and_dtype(flat_dtype, out_dtype, backend):
    outs, backing = [], []
    for name, g in zoo(out_dtype).items():
        if g is not None and "expanded" not in name:
            base = torch.full((g.untyped_storage().size() // g.element_size(),), 7.0).to(out_dtype)
            backing.append(base)
            outs.append(base.as_strided(g.shape, g.stride(), g.storage_offset()))
    offsets, size = slots_of(outs)
    flat = (torch.randint(-64, 64, (size,)) / 64).to(flat_dtype)
    expected = [b.clone() for b in backing]
    for o, b, at in zip(outs, expected, offsets):
        view = b.as_strided(o.shape, o.stride(), o.storage_offset())
        view.copy_(flat[at : at + o.numel()].view(o.shape) * 0.25)
    tw.bucket_unpack(flat, outs, offsets, scale=torch.tensor(0.25), backend=backend)
    assert all(same_bits(b, e) for b, e in zip(backing, expected))  # also outside the views


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_is_reported(dtype, bad, backend):
    for n, at in ((1, 0), (40, 0), (40, 39), (20000, 17001)):
        g = torch.ones(n).to(dtype)
        g[at] = bad
        flat = torch.zeros(n + 4)
        _, nonfinite = tw.bucket_pack([torch.ones(4), g], flat, [0, 4], backend=backend)
        assert nonfinite.item() == 1
        out = torch.empty(n)
        _, nonfinite = tw.ordered_sum([torch.ones(n).to(dtype), g], out, backend=backend)
        assert nonfinite.item() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_of_the_cast_is_reported_and_tiny_squares_are_kept(backend):
    flat = torch.empty(64, dtype=torch.float16)
    squares, nonfinite = tw.bucket_pack([torch.full((64,), 1e5)], flat, [0], backend=backend)
    assert nonfinite.item() == 1 and squares.isinf()
    flat = torch.empty(2)
    for value in (1e-30, 1e30):  # the square is outside fp32
        squares, nonfinite = tw.bucket_pack([torch.full((2,), value)], flat, [0], backend=backend)
        assert squares.item() == pytest.approx(2 * value**2, rel=1e-6) and nonfinite.item() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("W", [1, 2, 4, 7])
def test_ordered_sum_adds_in_rank_order(W, dtype, backend):
    chunks = torch.randn(W, 5003).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = chunks[0].to(wide)
    for w in range(1, W):
        total = total + chunks[w].to(wide)
    for out_dtype in (wide, torch.bfloat16):
        out = torch.full((5003,), float("nan"), dtype=out_dtype)
        squares, nonfinite = tw.ordered_sum(chunks, out, scale=0.25, backend=backend)
        assert same_bits(out, (total * 0.25).to(out_dtype))
        assert squares.item() == pytest.approx(out.double().square().sum().item(), rel=1e-12)
        assert nonfinite.item() == 0
    # However the buffer is cut, and also in place of the first chunk.
    parts = [torch.empty(n, dtype=wide) for n in (1, 4096, 906)]
    at = 0
    for part in parts:
        tw.ordered_sum([c[at : at + part.numel()] for c in chunks], part, backend=backend)
        at += part.numel()
    assert same_bits(torch.cat(parts), total)
    if dtype == wide:
        tw.ordered_sum(list(chunks), chunks[0], backend=backend)
        assert same_bits(chunks[0], total)


def test_same_bits_for_any_thread_count():
    grads = [torch.randn(n) for n in (50000, 3, 70001)]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        flat = torch.empty(sum(g.numel() for g in grads))
        stats = tw.bucket_pack(grads, flat, [0, 50000, 50003], scale=0.3)
        results.append([flat, *stats])
    torch.set_num_threads(2)
    assert all(same_bits(a, b) for r in results for a, b in zip(r, results[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_may_be_a_device_scalar(backend):
    g, scale = torch.randn(100), torch.tensor([3.0], dtype=torch.float64)
    a, b = torch.empty(100), torch.empty(100)
    tw.bucket_pack([g], a, [0], scale=scale, backend=backend)
    tw.bucket_pack([g], b, [0], scale=3.0, backend=backend)
    assert same_bits(a, b) and same_bits(a, g * 3)


def test_writes_bump_the_version_and_inputs_may_require_grad():
    flat, g = torch.zeros(4), torch.ones(4, requires_grad=True)
    version = flat._version
    tw.bucket_pack([g], flat, [0])
    assert flat._version > version and not flat.requires_grad
    version = flat._version
    tw.ordered_sum([g], flat)
    assert flat._version > version


def test_no_gradients_at_all():
    flat = torch.ones(4)
    squares, nonfinite = tw.bucket_pack([None, None], flat, [0, 2], accumulate=True)
    assert flat.tolist() == [1, 1, 1, 1] and squares.item() == nonfinite.item() == 0
    tw.bucket_pack([], flat, [])
    tw.bucket_unpack(flat, [], [])
    tw.bucket_pack([None, None], flat, [0, 2, 3])
    assert flat.tolist() == [0, 0, 0, 1]  # the last slot ends at the extra offset


def test_compiles_without_graph_break():
    def step(grads, flat):
        squares, _ = tw.bucket_pack(grads, flat, [0, 6], scale=0.5, accumulate=True)
        return squares + flat.sum()

    grads, flat = [torch.randn(2, 3), torch.randn(4)], torch.randn(10)
    eager_flat = flat.clone()
    expected = step(grads, eager_flat)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(grads, flat)
    assert same_bits(got, expected) and same_bits(flat, eager_flat)


def test_opcheck():
    ops = torch.ops.trainwright
    grads = [torch.randn(3, 2).t(), torch.randn(4).bfloat16()]
    check_opcheck(ops.bucket_pack_.default, torch.zeros(10), grads, [0, 6, 10], 0.5, None, True)
    check_opcheck(ops.bucket_unpack_.default, torch.ones(10), grads, [0, 6], 0.5, torch.ones(()))
    check_opcheck(ops.ordered_sum_.default, torch.ones(4), [torch.ones(4)] * 2, 0.5, None)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f: tw.bucket_pack([torch.ones(3)], f, [6]), ValueError, r"grads\[0\]: expected at most 2"),
        (lambda f: tw.bucket_pack([torch.ones(3)], f, [0, 4, 8]), ValueError, "offsets: expected 1 or 2 numbers"),
        (lambda f: tw.bucket_pack([torch.ones(3)] * 2, f, [4, 0]), ValueError, "offsets: expected ascending"),
        (lambda f: tw.bucket_pack([torch.ones(3).int()], f, [0]), TypeError, r"grads\[0\]: expected dtype"),
        (lambda f: tw.bucket_pack([torch.ones(3).to_sparse()], f, [0]), TypeError, r"grads\[0\]: expected a dense"),
        (lambda f: tw.bucket_pack([torch.ones(3)], f[::2], [0]), ValueError, "flat: expected a contiguous"),
        (lambda f: tw.bucket_pack([torch.ones(3)], f.view(2, 4), [0]), ValueError, "flat: expected shape"),
        (lambda f: tw.bucket_pack([torch.ones(3)], f, [0], scale=torch.ones(2)), ValueError, "scale: expected one"),
        (lambda f: tw.bucket_pack([torch.ones(3)], f, [0], scale=float("nan")), ValueError, "scale: expected a finite"),
        (lambda f: tw.bucket_unpack(f, [torch.ones(3)], [6]), ValueError, r"offsets\[0\]: expected a number in 0..5"),
        (lambda f: tw.ordered_sum([], f), ValueError, "chunks: expected at least one"),
        (lambda f: tw.ordered_sum([f, f.double()], f), TypeError, r"chunks\[1\]: expected torch.float32"),
        (lambda f: tw.ordered_sum(torch.ones(2, 7), f), ValueError, r"chunks: expected shape \(any, 8\)"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, text):
    flat = torch.full((8,), 5.0)
    with pytest.raises(error, match=text):
        call(flat)
    assert flat.tolist() == [5.0] * 8
