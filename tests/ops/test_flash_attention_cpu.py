"""The CPU kernels of attention: threads, memory, the cost of a window, rows with very large scores."""

import re
import time
from pathlib import Path

import pytest
import torch
import trainwright as tw
from attention_cases import BACKENDS, INF, NAN, option_inputs, qkv, reference, with_lse
from numerics import check_mean_error, same_bits

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels")


def gradients(threads, inputs, options):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        out, lse = with_lse(**leaves, **options, backend="cpu")
        total = (out * out).sum() + lse.sum()
        return [out, lse, *torch.autograd.grad(total, leaves.values())]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bias", ["BHij", "11ij", "BH1j", "1Hi1", "1H11"])
def test_gradients_of_options_have_the_same_bits_for_any_number_of_threads(bias):
    B, T, H = 2, 140, 3
    inputs = qkv(B, T, T, H, 1, 16, 16)
    sizes = {"B": B, "H": H, "i": T, "j": T, "1": 1}
    inputs["bias"] = torch.randn([sizes[c] for c in bias])
    inputs["alibi_slopes"], inputs["sinks"] = torch.rand(B, H), torch.randn(H)
    options = {"causal": True, "dropout_p": 0.2, "seed": 3}
    first, *others = (gradients(threads, inputs, options) for threads in (1, 2, 4))
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other))


def test_packed_sequences_have_the_bits_of_each_alone():
    lengths_q, lengths_k = (150, 0, 64, 3), (140, 9, 200, 1)
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    x = {n: t[0] for n, t in qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, 24, 16).items()}
    x = {n: t.requires_grad_() for n, t in x.items()}
    options = {"causal": True, "window": (70, 0), "return_lse": True, "backend": "cpu"}
    out, lse = tw.flash_attention_varlen(**x, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], **options)  # fmt: skip
    whole = torch.autograd.grad((out * out).sum() + lse[lse > -INF].sum(), x.values())
    parts = {n: t.split(lengths_q if n == "q" else lengths_k) for n, t in x.items()}
    each = [[t[None] for t in one] for one in zip(*parts.values())]
    outs, lses = zip(*(tw.flash_attention(*one, **options) for one in each))
    assert same_bits(out, torch.cat(outs, 1)[0]) and same_bits(lse, torch.cat(lses, 2)[0])
    total = sum((o * o).sum() + m[m > -INF].sum() for o, m in zip(outs, lses))
    assert all(same_bits(a, b) for a, b in zip(whole, torch.autograd.grad(total, x.values())))


def test_gradients_next_to_large_scores():
    """lse holds a score of thousands to 10^-4 only; the gradients do not come from it then."""
    draws = [{n: 20 * x for n, x in qkv(1, 70, 70, 2, 1, 64, 64).items()} for _ in range(96)]
    check_mean_error(with_lse, reference, draws, {"causal": True}, backend="cpu")


def test_gradients_that_sum_over_thousands_of_queries():
    """dk and dv of one key: 8 heads of 512 queries. Sums of sums, as torch's."""
    draws = [qkv(1, 512, 40, 8, 1, 32, 32) for _ in range(4)]
    check_mean_error(with_lse, reference, draws, {}, backend="cpu")


def test_a_row_of_finfo_min_has_the_gradients_of_a_uniform_softmax():
    inputs = qkv(1, 3, 5, 1, 1, 8, 8)
    bias = torch.zeros(3, 5)
    bias[1] = torch.finfo(torch.float32).min
    leaves = [x.requires_grad_() for x in inputs.values()]
    out = tw.flash_attention(*leaves, bias=bias, backend="cpu")
    (dv,) = torch.autograd.grad(out[0, 1].sum(), leaves[2])
    torch.testing.assert_close(dv, torch.full_like(dv, 0.2))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_and_inf_behind_a_bias_of_minus_inf_reach_nothing(bad):
    inputs = option_inputs("bias, broadcast over batch and queries", 2, 20, 150, 2, 1, 8, 8)
    inputs["bias"][:, :, 77] = -INF
    results = []
    for value in (0.0, bad):
        leaves = {n: x.clone() for n, x in inputs.items()}
        for n in "kv":
            leaves[n][:, 77] = value
        leaves = {n: x.requires_grad_() for n, x in leaves.items()}
        out = tw.flash_attention(**leaves, backend="cpu")
        results.append([out, *torch.autograd.grad((out * out).sum(), leaves.values())])
    for clean, other in zip(*results):
        torch.testing.assert_close(other, clean, rtol=1e-6, atol=1e-6)


def peak_bytes(call):
    """What the resident set of this process grows by while `call` runs."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        clear.write_text("5")
    except OSError:
        pytest.skip("the kernel does not reset the peak of a process here")

    def kib(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", status.read_text())[1])

    before = kib("VmRSS")
    call()
    return (kib("VmHWM") - before) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_memory_is_linear_in_the_sequence(dtype):
    T = 8192
    leaves = [torch.randn(1, T, 2, 32, dtype=dtype, requires_grad=True) for _ in range(3)]

    def call():
        out = tw.flash_attention(*leaves, causal=True, window=(64, 0), backend="cpu")
        torch.autograd.grad(out, leaves, out)

    call()  # the blocks that threads keep
    results = 4 * leaves[0].nbytes  # out and three gradients
    extra = peak_bytes(call) - results
    assert extra <= 4 * 4 * leaves[0].nbytes + (4 << 20)


def test_a_window_costs_its_width():
    x = torch.randn(1, 8192, 1, 32)

    def cpu_seconds(**options):  # of the process: what else runs on the machine does not count
        times = []
        for _ in range(3):
            start = time.process_time()
            tw.flash_attention(x, x, x, causal=True, backend="cpu", **options)
            times.append(time.process_time() - start)
        return min(times)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert cpu_seconds() > 6 * cpu_seconds(window=(255, 0))  # 16 times the pairs
    finally:
        torch.set_num_threads(before)
