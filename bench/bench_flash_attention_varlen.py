"""tw.flash_attention_varlen on sequences of unequal lengths, causal, against torch's scaled_dot_product_attention one
sequence after the other, and on the sequences padded to the longest."""

import pytest
import torch
import torch.nn.functional as F
import trainwright as tw

from bench.harness import calls_of, exact

LENGTHS = (700, 40, 260, 512, 128, 408)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_flash_attention_varlen(compare, device, mode, dtype):
    total, H, D = sum(LENGTHS), 8, 64
    starts = torch.tensor((0, *LENGTHS), device=device).cumsum(0).int()
    inputs = {n: torch.randn(total, H, D, device=device, dtype=dtype) for n in "qkv"}

    def packed(q, k, v):
        return tw.flash_attention_varlen(
            q, k, v, starts, starts, max_seqlen_q=max(LENGTHS), max_seqlen_k=max(LENGTHS), causal=True, check=False
        )  # fmt: skip

    def one_by_one(q, k, v):
        parts = zip(*(x.transpose(0, 1).split(LENGTHS, 1) for x in (q, k, v)))
        outs = [F.scaled_dot_product_attention(*(x[None] for x in p), is_causal=True)[0] for p in parts]  # fmt: skip
        return torch.cat(outs, 1).transpose(0, 1)

    def padded(q, k, v):  # behind a causal mask no query sees the padding
        q, k, v = (
            torch.nn.utils.rnn.pad_sequence(x.split(LENGTHS), batch_first=True).transpose(1, 2)
            for x in (q, k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return torch.cat([x[:n] for x, n in zip(out, LENGTHS)])

    functions = {
        "trainwright": packed,
        "torch fused, one by one": one_by_one,
        "torch fused, padded": padded,
    }
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    tensors = 4 if mode == "fwd" else 12
    compare(
        "flash_attention_varlen", mode, (len(LENGTHS), total, H, D, "causal"), dtype,
        calls_of(functions, inputs, mode), exact(one_by_one, inputs, mode),
        bytes_moved=tensors * inputs["q"].nbytes, flops=4 * H * pairs * D * (1.0 if mode == "fwd" else 3.5),
    )  # fmt: skip
