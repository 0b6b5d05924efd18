"""More than 2^31 elements: addresses, blocks of 8-bit codes and random numbers go by 64-bit indices.

Memory that nobody touches costs nothing: of tensors this large only the last units are worked on, except on the CPU,
where the op is one call (slow).
"""

import pytest
import torch
import trainwright as tw
import vgpu_backend
from numerics import backends_for_tests

from optim.op_cases import HYPER, OPS, SOME, Format, make
from optim.test_ops import assert_same

BF16 = torch.bfloat16
N = (1 << 31) + 12
INT8 = Format(BF16, BF16, "none", "int8", True)


@pytest.mark.parametrize("form", [f for f in SOME if f.stochastic], ids=str)
@pytest.mark.parametrize("backend", [b for b in backends_for_tests(tw.adamw_) if b != "torch"])
def test_the_last_shard_of_a_huge_parameter(backend, form):
    case = make("adamw", [(300,), (9,), (513,)], form)
    case.offsets = [(1 << 31) - 256, 1 << 34, (1 << 40) + 256]
    assert_same(case.clone().run(backend), case.clone().run("torch"))


def huge_and_its_end(count):
    """A case of N elements of which the last `count` have values, and those as a case of their own."""
    end = make("adamw", [(count,)], INT8, flags=0, lost=False)
    case, start = end.clone(), N - count
    assert start % 256 == 0
    end.offsets = [start]
    case.params, case.grads = torch.empty(N, dtype=BF16), torch.empty(N, dtype=BF16)
    case.params, case.grads = [case.params], [case.grads]
    case.states = [
        torch.empty(N if s.element_size() == 1 else -(-N // 256), dtype=s.dtype) for s in end.states
    ]
    for lists in ("params", "grads", "states"):
        for whole, part in zip(getattr(case, lists), getattr(end, lists)):
            whole[len(whole) - len(part) :] = part
    return case, end


def assert_ends_as(case, end):
    for lists in ("params", "states"):
        tensors = getattr(case, lists)
        parts = zip(tensors, getattr(end, lists))
        tensors[:] = [whole[len(whole) - len(part) :] for whole, part in parts]
    assert_same(case, end.run("torch"))


@pytest.mark.parametrize("backend", ["triton"] if "triton" in backends_for_tests(tw.adamw_) else [])
def test_the_end_of_a_huge_tensor_in_triton(backend, monkeypatch):
    import trainwright.kernels._optimizer as driver

    case, end = huge_and_its_end(driver.SCALED_CHUNK + 12)
    whole_table = driver.chunk_table
    monkeypatch.setattr(driver, "chunk_table", lambda *args: whole_table(*args)[-2:])
    assert_ends_as(case.run(backend), end)


@pytest.mark.parametrize("where", ["vgpu"])
def test_the_end_of_a_huge_tensor_on_cuda(where):
    unit, units = 8192, 3
    case, end = huge_and_its_end((units - 1) * unit + 12)
    memory = torch.zeros(2, 16, dtype=torch.int64)
    m, m_scale, v, v_scale = case.states
    tensors = [case.params[0], case.grads[0], m, v, m_scale, v_scale, *case.steps]
    p, g, m, v, m_scale, v_scale, step = (t.data_ptr() for t in tensors)
    table = torch.tensor(
        [[p, g, 0, m, v, 0, m_scale, v_scale, 0, step, N, 0, 15, 15, case.spec[0]]]
    )
    run, skip = OPS["adamw"].STEP["vgpu table"], torch.tensor([1.0, 1.0], dtype=torch.float64)
    run(table, memory, True, case.hyper, skip, case.seed, None)
    row = memory[1].view(torch.int32)
    first_unit = row[24:25]
    assert memory[1, 10] == N and first_unit == 0 and row[26] == unit
    first_unit += units - -(-N // unit)  # then the launch for a short tensor works on the end
    short = table.clone()
    short[0, 10] = units * 1024
    with vgpu_backend.runtime().device.memory(*tensors):
        run(short, memory, False, case.hyper, None, case.seed, None)
    assert_ends_as(case, end)


@pytest.mark.slow
def test_all_of_a_huge_tensor_on_the_cpu():
    """4 GiB; and the gradient, one number everywhere, takes the path of strided operands."""
    n = (1 << 31) + 9
    p, step = torch.zeros(n, dtype=BF16), torch.zeros((), dtype=torch.float64)
    g = torch.tensor([0.1], dtype=BF16).expand(n)
    options = {"lr": HYPER["lr"], "stochastic_rounding": True, "seed": 5}
    tw.sgd_([p], [g], [step], backend="cpu", **options)
    for start in ((1 << 31) - 1000, n - 5):
        few, step = torch.zeros(n - start, dtype=BF16), torch.zeros((), dtype=torch.float64)
        tw.sgd_([few], [g[start:]], [step], offsets=[start], backend="torch", **options)
        assert torch.equal(p[start:], few) and len(few.unique()) > 1
