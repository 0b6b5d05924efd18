"""`tw.flash_attention` against torch's scaled_dot_product_attention over a grid of shapes, on the CPU:

    python -m bench.attention_table [--heads 1 8] [--tokens 128 512 1024] [--dims 64 128] [--rounds 5]

For each shape, full and causal, forward and forward + backward, in fp32 and bf16: torch's time over ours, and our rate
over torch's sgemm (1024^3) in the same round. Only scores that the mask leaves count as work: 4 D flops each forward,
10 D backward. Providers take turns; medians of CPU wall time. The geometric mean of each dtype and mode ends the table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import trainwright as tw
from rich.console import Console
from rich.table import Table

SGEMM = 1024


def seconds(call: Callable[[], object], least: float = 2e-3) -> float:
    """Per call, over as many calls as take `least` seconds together."""
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < least or not calls:
        call()
        calls += 1
    return (time.perf_counter() - begin) / calls


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    out = tw.flash_attention(q, k, v, causal=causal)
    assert isinstance(out, torch.Tensor)
    return out


def calls(
    H: int, T: int, D: int, causal: bool, dtype: torch.dtype, backward: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    q, k, v = (torch.randn(1, T, H, D).to(dtype).requires_grad_(backward) for _ in range(3))
    upstream = torch.randn(1, T, H, D).to(dtype)

    def bound(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def run() -> object:
            out = function(q, k, v, causal)
            return torch.autograd.grad(out, (q, k, v), upstream) if backward else out

        return run

    return bound(ours), bound(torchs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    a, b = torch.randn(SGEMM, SGEMM), torch.randn(SGEMM, SGEMM)
    table = Table("dtype", "mode", "mask", "B·H", "T", "D", "torch / ours", "share of sgemm")
    ratios: dict[tuple[str, str], list[float]] = {}
    grid = itertools.product(
        (torch.float32, torch.bfloat16), (False, True), (False, True), options.heads, options.tokens, options.dims
    )  # fmt: skip
    with Console(stderr=True).status("measuring"):
        for dtype, backward, causal, H, T, D in grid:
            mine, peer = calls(H, T, D, causal, dtype, backward)
            mine(), peer()
            ratio, share = [], []
            pairs = T * (T + 1) // 2 if causal else T * T
            flops = H * pairs * D * (14 if backward else 4)
            for _ in range(options.rounds):
                own, other = seconds(mine), seconds(peer)
                sgemm = 2 * SGEMM**3 / seconds(lambda: a @ b)
                ratio.append(other / own)
                share.append(flops / own / sgemm)
            name, mode = str(dtype).removeprefix("torch."), "fwd+bwd" if backward else "fwd"
            ratios.setdefault((name, mode), []).append(statistics.median(ratio))
            row = (name, mode, "causal" if causal else "full", H, T, D)
            table.add_row(
                *map(str, row), f"{statistics.median(ratio):.2f}", f"{statistics.median(share):.2f}"
            )
    console = Console()
    console.print(table)
    for (name, mode), values in ratios.items():
        console.print(
            f"{name} {mode}: geometric mean {statistics.geometric_mean(values):.2f}, least {min(values):.2f}"
        )


if __name__ == "__main__":
    main()
