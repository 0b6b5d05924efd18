"""Compiled Triton attention on the virtual GPU: what each kernel moves, and how.

test_triton.py runs this file in a process of its own, since it needs Triton's compiler (TRITON_INTERPRET=0).
"""

import os

import pytest
import torch
import trainwright as tw
from numerics import same_bits, vgpu_close
from trainwright import vgpu
from trainwright.kernels import flash_attention as kernels
from trainwright.kernels._attention_configs import look_up

ARCH = os.environ.get("VGPU_ARCH", "sm_80")
CAPABILITY = int(ARCH.removeprefix("sm_").rstrip("a"))
T, MOST_BYTES = 256, 1.05


def at_a_line(t):
    """A copy of t that begins at a cache line, as memory of a GPU's allocator does."""
    whole = torch.empty(t.nbytes + 128, dtype=torch.uint8)
    start = -whole.data_ptr() % 128
    return whole[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def counts(D, bias=None, p=0.0):
    """Counters by kernel of one forward and backward, a single head of T queries and keys; the second launches, of
    programs whose result was not finite, are left out."""
    device = vgpu.Device(ARCH, count=True, check=False)
    q, k, v, dout = (at_a_line(torch.randn(1, T, 1, D).bfloat16()) for _ in range(4))
    seed = torch.tensor([3, 0]) if p else None
    options = (None, None, None, bias, None, seed, 0, 0, D**-0.5, -1, -1, False, 0.0, p)
    with device:
        out, lse = kernels.flash_attention_fwd(q, k, v, *options)
        need = [True, True, True, False, bias is not None, False]
        kernels.flash_attention_bwd(dout, None, q, k, v, out, lse, *options, need)
    found = {}
    for kernel in device.counters:
        name = kernel.name.removeprefix("_flash_attention_").removesuffix("_kernel")
        found.setdefault(name, kernel)
    return found


@pytest.mark.parametrize("D", [64, 128])
def test_bytes_are_those_of_the_tiles(D):
    """Each program reads its rows once, and the rows across once per block of its own."""
    found = counts(D)
    tile = {kind: look_up(kind, CAPABILITY, 16, D, False) for kind in ("fwd", "dkv", "dq")}
    x, row = 2 * T * D, 4 * T  # bytes of q and of lse
    ideal = {
        "fwd": 2 * x + row + T // tile["fwd"][0] * 2 * x,
        "delta": 2 * x + row,
        "dkv": 4 * x + T // tile["dkv"][1] * (2 * x + 2 * row),
        "dq": 3 * x + 2 * row + T // tile["dq"][0] * 2 * x,
    }
    assert set(ideal) <= set(found)
    for name, expected in ideal.items():
        kernel = found[name]
        ratio = kernel.total.global_bytes / expected
        assert 0.999 <= ratio <= MOST_BYTES, f"{name}: {ratio:.4f} of ideal"
        assert kernel.total.sector_efficiency >= 0.98, name
        assert kernel.total.bank_conflicts == 0 and kernel.local_bytes == 0, name


def test_options_add_no_conflict_and_no_local_memory():
    bias = at_a_line(torch.randn(1, 1, T, T))
    for name, kernel in counts(64, bias, p=0.2).items():
        assert kernel.total.bank_conflicts == 0 and kernel.local_bytes == 0, name


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_split_keys_are_read_once_for_each_head(D):
    """By one program each piece; parts are written and read once, in fp32."""
    Tk, H, pieces = 1600, 2, 4
    device = vgpu.Device(ARCH, count=True)
    q, k, v = (at_a_line(torch.randn(1, n, H, D).bfloat16()) for n in (1, Tk, Tk))
    options = (*[None] * 6, 0, 0, D**-0.5, -1, 0, False, 0.0, 0.0)
    with device:
        out, lse = kernels.flash_attention_fwd(q, k, v, *options)
    first, _again, merge = (
        device.counters
    )  # the second launch is of programs whose result was not finite
    row, part = 2 * D, 4 * D + 4
    ideal = H * (2 * Tk * row + pieces * (row + part))
    assert ideal <= first.total.global_bytes <= MOST_BYTES * ideal
    assert first.total.bank_conflicts == 0 and first.local_bytes == 0
    assert merge.total.global_bytes <= H * (pieces * (part + 4) + row + 4) * MOST_BYTES
    score = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * D**-0.5
    expected = torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v.double())
    assert vgpu_close("bf16 attention", out, expected)
    assert vgpu_close("lse in base 2", lse, score.logsumexp(-1))


def run(device, q, k, v, dout, **options):
    """out, lse and gradients, and what `explain` says of them."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    results = []

    def call():
        out, lse = tw.flash_attention(*leaves, return_lse=True, backend="triton", **options)
        results.extend([out, lse, *torch.autograd.grad(out, leaves, dout)])

    with device:
        return results, tw.explain(call)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(tw.dispatch, "triton_reason", lambda: "ok")
    monkeypatch.setattr(tw.dispatch, "interpreting", lambda: True)
    return vgpu.Device(ARCH)


@pytest.mark.parametrize("D", [64, 72])
def test_descriptors_read_what_pointers_read(D, device, monkeypatch):
    """Every head, batch and tail, with NaN around the tensors: the same bits."""
    whole = torch.full((2, 210, 2, D + 24), float("nan"), dtype=torch.bfloat16)
    q, k, v, dout = (whole.clone()[:, :200, :, 8 : D + 8] for _ in range(4))
    for x in (q, k, v, dout):
        x.copy_(torch.randn(x.shape))
    options = {"causal": True, "window": (150, 0)}
    found, text = run(device, q, k, v, dout, **options)
    assert all(x.isfinite().all() for x in found)
    how = "through descriptors" if CAPABILITY >= 90 else "by pointers: sm_80 has no"
    assert f"fwd reads {how}" in text and f"dq reads {how}" in text
    monkeypatch.setattr(kernels, "refusal", lambda *_: "asked for")
    expected, text = run(device, q, k, v, dout, **options)
    assert "fwd reads by pointers: asked for" in text
    assert all(same_bits(a, b) for a, b in zip(found, expected))


def beginning_anywhere(x, skipped):
    """x as rows of an odd number of elements, behind some that are not its own."""
    whole = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
    return whole[..., skipped : skipped + x.shape[-1]].copy_(x)


@pytest.mark.parametrize(
    "odd", ["v", "kv", *(pytest.param(odd, marks=pytest.mark.slow) for odd in ("k", "q, dout"))]
)
def test_operands_of_any_alignment(odd, device):
    """Of a loop's two streamed operands one alone, too: Triton 3.8 misplaces a fence if their loads differ."""
    operands = {n: torch.randn(1, 130, 2, 64).bfloat16() for n in ("q", "k", "v", "dout")}
    expected, _ = run(device, **operands)
    skipped = {n: (0 if odd == "kv" else 1) for n in odd.replace("kv", "k, v").split(", ")}
    for n, s in skipped.items():
        operands[n] = beginning_anywhere(operands[n], s)
    found, _ = run(device, **operands)
    assert all(same_bits(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize(
    ("D", "Dv"),
    [(72, 64), *(pytest.param(*d, marks=pytest.mark.slow) for d in ((45, 64), (64, 45)))],
)
def test_rows_of_any_length(D, Dv, device):
    """Zeros behind a head dim change no bit, wherever they come from."""
    operands = {n: torch.randn(1, 130, 1, D).bfloat16() for n in "qk"}
    operands |= {n: torch.randn(1, 130, 1, Dv).bfloat16() for n in ("v", "dout")}
    found, _ = run(device, **operands, scale=0.1)
    padded = {n: torch.nn.functional.pad(x, (0, -x.shape[3] % 16)) for n, x in operands.items()}
    expected, _ = run(device, **padded, scale=0.1)
    for a, b in zip(found, expected):
        assert same_bits(a, b[..., : a.shape[-1]])
