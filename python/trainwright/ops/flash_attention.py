"""Exact attention without the (Tq, Tk) matrix: `flash_attention`, and `merge_attention` for partial results.

The compiled kernels and the Triton kernels run the core: causal, window, grouped heads, any scale, `lse` with gradient.
The torch reference (`_attention_reference`) runs every option, with the (Tq, Tk) matrix in memory, and is the
specification of all.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from trainwright import dispatch
from trainwright.dispatch import Candidate
from trainwright.errors import (
    FLOAT_DTYPES,
    check_bool,
    check_number,
    check_tensor,
    type_error,
    value_error,
)
from trainwright.ops import _library
from trainwright.ops._attention_reference import AttentionReference, bwd_reference, fwd_reference
from trainwright.ops._library import acc_dtype

__all__ = ["flash_attention", "merge_attention"]

BAND = "float scale, int left, int right, bool top_left"  # left, right: keys to either side, -1 for no limit
FWD = f"(Tensor q, Tensor k, Tensor v, {BAND}) -> (Tensor, Tensor)"
BWD = (
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {BAND}, "
    "bool need_dq, bool need_dk, bool need_dv) -> (Tensor, Tensor, Tensor)"
)


def _fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, top_left: bool
) -> tuple[Tensor, Tensor]:
    B, Tq, H, _ = q.shape
    return q.new_empty(B, Tq, H, v.shape[-1]), q.new_empty(B, H, Tq, dtype=acc_dtype(q.dtype))


def _bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, left: int, right: int, top_left: bool, need_dq: bool, need_dk: bool, need_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape if need_dq else 0),
        q.new_empty(k.shape if need_dk else 0),
        q.new_empty(v.shape if need_dv else 0),
    )


_FORWARD = _library.define_backends(
    "flash_attention", "flash_attention_fwd" + FWD, fwd_reference, _fwd_fake
)
_BACKWARD = _library.define_backends(
    "flash_attention", "flash_attention_bwd" + BWD, bwd_reference, _bwd_fake
)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, top_left: bool, backend: str
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = _FORWARD[backend](q, k, v, scale, left, right, top_left)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.backend = (scale, left, right, top_left), backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if dlse is not None:
            dlse = dlse.contiguous()
        need = ctx.needs_input_grad[:3]
        grads = _BACKWARD[ctx.backend](dout, dlse, q, k, v, out, lse, *ctx.options, *need)
        return (*(g if n else None for g, n in zip(grads, need)), *[None] * 5)


def _autocast(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Under autocast, attention runs in the autocast dtype; fp64 stays."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return [q, *tensors]
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in (q, *tensors)]


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    op = "flash_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, x)
        if x.dim() != 4:
            raise value_error(op, name, "shape (B, T, heads, head dim)", tuple(x.shape))
    B, _, H, D = q.shape
    for name, x in (("k", k), ("v", v)):
        check_tensor(op, name, x, dtypes=(q.dtype,), device=q.device)
    check_tensor(op, "k", k, shape=(B, None, None, D))
    check_tensor(op, "v", v, shape=(B, k.shape[1], k.shape[2], None))
    if D == 0 or v.shape[-1] == 0:
        raise value_error(op, "q" if D == 0 else "v", "a head dim of at least 1", 0)
    G = k.shape[2]
    if (G == 0 and H != 0) or (G != 0 and H % G != 0):
        raise value_error(op, "k", f"a number of heads that divides q's {H}", G)


def _check_window(window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise type_error("flash_attention", "window", "None or (left, right)", repr(window))
    for side in window:
        if isinstance(side, bool) or not isinstance(side, int):
            raise type_error("flash_attention", "window", "two ints", repr(window))
        if side < -1:
            raise value_error("flash_attention", "window", "-1 (no limit) or more", side)
    return int(window[0]), int(window[1])


def _check_extras(
    q: Tensor, k: Tensor, softcap: Any, alibi: Any, bias: Any, sinks: Any, dropout_p: Any, seed: Any
) -> None:
    op = "flash_attention"
    B, Tq, H, _ = q.shape
    if softcap is not None:
        check_number(op, "softcap", softcap)
        if softcap <= 0:
            raise value_error(op, "softcap", "a number above 0", softcap)
    check_number(op, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise value_error(op, "dropout_p", "a probability in [0, 1]", dropout_p)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise type_error(op, "seed", "None or an int", type(seed).__name__)
    if alibi is not None:
        check_tensor(op, "alibi_slopes", alibi, device=q.device)
        if alibi.shape not in ((H,), (B, H)):
            raise value_error(op, "alibi_slopes", f"shape ({H},) or ({B}, {H})", tuple(alibi.shape))
    if bias is not None:
        check_tensor(op, "bias", bias, device=q.device)
        full = (B, H, Tq, k.shape[1])
        tail = full[4 - min(bias.dim(), 4) :]
        if bias.dim() > 4 or any(b not in (1, f) for b, f in zip(bias.shape, tail)):
            raise value_error(op, "bias", f"a shape that broadcasts to {full}", tuple(bias.shape))
    if sinks is not None:
        check_tensor(op, "sinks", sinks, shape=(H,), device=q.device)


def _seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    if seed is None:  # from the default generator, without reading it back to the host
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64).to(device)
    wrapped = seed & (2**64 - 1)
    wrapped -= 2**64 if wrapped >= 2**63 else 0
    return torch.tensor(wrapped, dtype=torch.int64, device=device)


# Options that only the torch reference implements. Any of them sends the call there.
EXTRAS = ("softcap", "alibi_slopes", "bias", "sinks", "dropout_p")
_SIZES = (("D", 512), ("Dv", 512))


@dispatch.register(
    "flash_attention",
    Candidate("cpu", FLOAT_DTYPES, limits=_SIZES, lacks=EXTRAS),
    Candidate("triton", FLOAT_DTYPES[:3], limits=(("D", 256), ("Dv", 256)), lacks=EXTRAS),
    Candidate("torch", FLOAT_DTYPES, limits=_SIZES),
)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_align: str = "bottom-right",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query over the keys it sees.

    ``out[i] = Σ_j softmax_j(score[i, j]) v[j]``, ``score = softcap(scale · q[i]·k[j]) + bias + alibi``, ``lse = log Σ_j
    exp(score)``. A query with nothing to attend to gives out 0, lse −inf and gradients 0.

    Args:
        q: (B, Tq, H, D); fp32, bf16, fp16 or fp64; any strides; D up to 512.
        k: (B, Tk, G, D), dtype and device of q; H a multiple of G: query head h reads key head h // (H / G).
        v: (B, Tk, G, Dv).
        causal: query i sees keys up to its own position.
        causal_align: position of query i: "bottom-right" i + Tk − Tq, "top-left" i.
        scale: any finite number; default 1/√D.
        window: (left, right), keys seen to either side of the position, inclusive; −1 for no limit.
        softcap: score becomes c·tanh(score/c); above 0.
        alibi_slopes: (H,) or (B, H); adds −slope·|i + (Tk − Tq) − j|.
        bias: broadcastable to (B, H, Tq, Tk).
        sinks: (H,) logits that join the softmax denominator of `out`, not of `lse`.
        dropout_p: probability in [0, 1] of dropping a weight.
        seed: of the dropout mask; None draws one from torch's default generator.
        return_lse: also return lse; gradients flow through it.
        deterministic: every backend is bit-reproducible; accepted for compatibility.
        backend: None, "cpu", "cuda", "triton" or "torch".

    Returns:
        out (B, Tq, H, Dv), dtype of q; with `return_lse` the pair ``(out, lse)``, lse (B, H, Tq) natural log, fp32
        (fp64 for fp64).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, shape or range.
        trainwright.BackendError: no backend can run the call.

    Numerics: scores, softmax and sums in fp32 (fp64 for fp64), rounded once; bit-equal for any number of threads. A key
    that a query does not see never reaches it, even if it is NaN or inf. softcap, alibi_slopes, bias, sinks and dropout
    run on the torch reference, which stores the (Tq, Tk) matrix. Under autocast q, k, v are cast to the autocast dtype.

    Source: Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    >>> import torch, trainwright as tw
    >>> q, k, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    >>> tw.flash_attention(q, k, v, causal=True).flatten()
    tensor([1., 2.])
    """
    op = "flash_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, x)
    q, k, v = _autocast(q, k, v)
    _check_qkv(q, k, v)
    check_bool(op, "causal", causal)
    check_bool(op, "return_lse", return_lse)
    if causal_align not in ("bottom-right", "top-left"):
        raise value_error(op, "causal_align", "'bottom-right' or 'top-left'", repr(causal_align))
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    check_number(op, "scale", scale)
    left, right = _check_window(window)
    if causal:
        right = 0
    if deterministic is not None:
        check_bool(op, "deterministic", deterministic)
    _check_extras(q, k, softcap, alibi_slopes, bias, sinks, dropout_p, seed)

    chosen = dispatch.resolve(
        op, backend, q.device, q.dtype, D=q.shape[-1], Dv=v.shape[-1],
        softcap=softcap is not None, alibi_slopes=alibi_slopes is not None, bias=bias is not None,
        sinks=sinks is not None, dropout_p=dropout_p > 0,
    )  # fmt: skip
    band = (float(scale), left, right, causal_align == "top-left")
    if chosen == "torch":
        drawn = _seed_tensor(seed, q.device) if dropout_p > 0 else None
        cap = None if softcap is None else float(softcap)
        terms = (alibi_slopes, bias, sinks, drawn)
        out, lse = AttentionReference.apply(q, k, v, *terms, *band, cap, float(dropout_p))
    else:
        out, lse = _FlashAttention.apply(q, k, v, *band, chosen)
    return (out, lse) if return_lse else out


@dispatch.register("merge_attention", Candidate("torch", FLOAT_DTYPES))
def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a − lse)·out_a + exp(lse_b − lse)·out_b``. A part with lse
    −inf counts for nothing, whatever its out; two of them give (0, −inf).

    Args:
        out_a, out_b: (B, T, H, Dv), same shape, dtype and device.
        lse_a, lse_b: (B, H, T), natural log, as `flash_attention` returns them.
        backend: None or "torch".

    Returns:
        (out, lse): dtype of out_a, and fp32 (fp64 for fp64). Differentiable in all four arguments.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype or shape.

    Numerics: in fp32 (fp64 for fp64), `out` rounded once to its dtype; repeats are bit-equal.

    Source: Dao et al., "FlashAttention", NeurIPS 2022 (rescaling by the log-sum-exp).

    >>> import torch, trainwright as tw
    >>> one, zero = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> tw.merge_attention(one, zero, 3 * one, zero)[0].flatten()
    tensor([2., 2.])
    """
    op = "merge_attention"
    check_tensor(op, "out_a", out_a, shape=(None,) * 4)
    check_tensor(op, "out_b", out_b, dtypes=(out_a.dtype,), shape=out_a.shape, device=out_a.device)
    B, T, H, _ = out_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(op, name, lse, shape=(B, H, T), device=out_a.device)
    dispatch.resolve(op, backend, out_a.device, out_a.dtype)
    acc = acc_dtype(out_a.dtype)
    a, b = lse_a.to(acc), lse_b.to(acc)
    top = torch.maximum(a, b).detach()
    empty = top == -math.inf
    shift = top.masked_fill(empty, 0.0)
    weight_a, weight_b = torch.exp(a - shift), torch.exp(b - shift)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)

    def part(weight: Tensor, lse: Tensor, out: Tensor) -> Tensor:
        nothing = (lse == -math.inf).transpose(1, 2)[..., None]
        share = (weight / total).transpose(1, 2)[..., None]
        return share.masked_fill(nothing, 0.0) * out.to(acc).masked_fill(nothing, 0.0)

    out = part(weight_a, a, out_a) + part(weight_b, b, out_b)
    lse = (shift + torch.log(total)).masked_fill(empty, -math.inf)
    return out.to(out_a.dtype), lse


@dispatch.self_check("flash_attention")
def _check(backend: str, device: torch.device) -> list[Tensor]:
    q, k, v = torch.randn(1, 19, 4, 8), torch.randn(1, 23, 2, 8), torch.randn(1, 23, 2, 6)
    return _library.outputs_and_gradients(
        functools.partial(flash_attention, causal=True, return_lse=True), backend, device, q=q, k=k, v=v
    )  # fmt: skip


@dispatch.self_check("merge_attention")
def _check_merge(backend: str, device: torch.device) -> list[Tensor]:
    out, lse = torch.randn(2, 1, 5, 2, 4), torch.randn(2, 1, 2, 5)
    return _library.outputs_and_gradients(
        merge_attention, backend, device, out_a=out[0], lse_a=lse[0], out_b=out[1], lse_b=lse[1]
    )
