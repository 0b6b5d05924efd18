"""tw.packed_weights: the same bits as without it, one copy of a weight for many products, and none that is stale."""

import pytest
import torch
import trainwright as tw
from numerics import check_opcheck, same_bits
from trainwright import dispatch
from trainwright.ops import _packed_weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
pytestmark = pytest.mark.skipif(
    dispatch.backends_of("linear").get("cpu") != "ok", reason="needs the compiled CPU kernels"
)


@pytest.fixture
def packed(monkeypatch):
    """The weights that are packed, in order."""
    done, real = [], _packed_weights.gemm_pack_

    def pack(panels, b, a_dtype):
        done.append(tuple(b.shape))
        real(panels, b, a_dtype)

    monkeypatch.setattr(_packed_weights, "gemm_pack_", pack)
    return done


def parameter(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


def step(weight, xs, **options):
    """Outputs and gradients of a few microbatches."""
    xs = [x.clone().requires_grad_() for x in xs]
    ys = [tw.linear(x, weight, backend="cpu", **options) for x in xs]
    grads = torch.autograd.grad(ys, [*xs, weight], [y.detach() for y in ys])
    return [*ys, *grads]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (5, 33, 257), (70, 131, 515), (3, 700, 40)])
def test_same_bits_from_one_copy_of_each_kind(M, N, K, dtype, packed):
    weight, xs = parameter(N, K, dtype=dtype), torch.randn(3, M, K).to(dtype)
    bias, residual = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
    options = {"bias": bias, "residual": residual, "activation": "gelu"}
    want = step(weight, xs, **options)
    assert packed == []
    with tw.packed_weights():
        got = step(weight, xs, **options)
    assert all(same_bits(a, b) for a, b in zip(got, want))
    assert sorted(packed) == sorted({(K, N), (N, K)})  # forward, gradient of x


def test_a_changed_weight_is_packed_again(packed):
    weight, x = parameter(40, 30), torch.randn(6, 30)
    weight.grad = torch.randn(40, 30)
    optimizers = [f([weight], lr=0.1) for f in (torch.optim.SGD, tw.optim.SGD, tw.optim.AdamW)]
    changes = {
        "in place": lambda: weight.mul_(2.0),
        "another version counter": lambda: weight.data.add_(1.0),
        "other memory": lambda: setattr(weight, "data", torch.randn(40, 30)),
        **{type(optimizer).__module__: optimizer.step for optimizer in optimizers},
    }
    with tw.packed_weights(), torch.no_grad():
        tw.linear(x, weight, backend="cpu")
        for count, (name, change) in enumerate(changes.items(), 2):
            change()
            want = torch.ops.trainwright.gemm(x, weight.t(), None, None, 0, x.dtype, False)[0]
            for _ in range(2):
                assert same_bits(tw.linear(x, weight, backend="cpu"), want), name
            assert len(packed) == count, name


def test_memory_that_is_used_again_is_not_taken_for_the_old_weight(packed):
    x = torch.randn(4, 64)
    with tw.packed_weights():
        for _ in range(5):
            weight = parameter(64, 64)
            want = torch.ops.trainwright.gemm(x, weight.t(), None, None, 0, x.dtype, False)[0]
            assert same_bits(tw.linear(x, weight, backend="cpu"), want)
            del weight
    assert len(packed) == 5


def test_room_is_bounded_and_given_back(packed):
    a, b, x = parameter(64, 64), parameter(64, 64), torch.randn(4, 64)
    size = 4 * torch.ops.trainwright.gemm_packed_size(a.t(), torch.float32)
    with tw.packed_weights(max_bytes=size):
        for _ in range(2):
            tw.linear(x, a, backend="cpu")
            tw.linear(x, b, backend="cpu")
        assert len(packed) == 1
        with tw.packed_weights():
            tw.linear(x, b, backend="cpu")
            assert len(packed) == 2
        tw.linear(x, a, backend="cpu")
        assert len(packed) == 2
    assert _packed_weights._active.cache is None
    with (
        pytest.raises(ValueError, match="packed_weights: max_bytes"),
        tw.packed_weights(max_bytes=-1),
    ):
        pass  # fmt: skip


def test_what_a_step_makes_of_a_weight_is_not_kept(packed):
    weight, x = parameter(64, 64), torch.randn(4, 64)
    with tw.packed_weights(), torch.autocast("cpu", torch.bfloat16):
        tw.linear(x, weight, backend="cpu")
    with tw.packed_weights():
        tw.linear(x, weight * 2, backend="cpu")
        tw.linear(x.expand(300, 4, 64), weight, backend="cpu")  # many rows
    assert packed == []


def test_opcheck():
    a, b = torch.randn(3, 5), torch.randn(5, 4)
    ops = torch.ops.trainwright
    panels = torch.zeros(ops.gemm_packed_size(b, a.dtype))
    check_opcheck(ops.gemm_pack_.default, panels, b, a.dtype)
    ops.gemm_pack_(panels, b, a.dtype)
    check_opcheck(ops.gemm_packed.default, a, b, panels, None, None, 0, a.dtype, True)
    with pytest.raises(RuntimeError, match="packed: expected gemm_packed_size numbers"):
        ops.gemm_packed(a, b, panels[1:].clone(), None, None, 0, a.dtype, True)
