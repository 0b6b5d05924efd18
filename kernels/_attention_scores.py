"""The score of a pair and its options: cap, bias, ALiBi, sink, dropout.

    score = cap tanh(scale q.k / cap) + bias - slope |i + (Tk - Tq) - j|

Scores are in base 2 (score * log2 e, one multiplication less per pair), but natural with a bias or ALiBi. A bias of
finfo.min, which masks with less emphasis than -inf, is finite and would not be in base 2; and both make a large lse, so
that its rounding from one base to the other shows.
"""

import triton
import triton.language as tl
from trainwright.kernels._attention_tiles import ALIBI, BIAS, DROPOUT, SINKS, SOFTCAP, sees

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NATURAL = tl.constexpr(BIAS.value | ALIBI.value)
RARE = tl.constexpr(1000.0)  # |lse| from which its rounding shows in p = exp(score - lse)


@triton.jit
def to_unit(x, O: tl.constexpr):
    """A natural score in the unit of the kernel."""
    if NATURAL & O:
        return x
    return x * LOG2E


@triton.jit
def exp_of(x, O: tl.constexpr):
    if NATURAL & O:
        x = x * LOG2E
    return tl.math.exp2(x)


@triton.jit
def _tanh(y):
    magnitude = tl.abs(y)
    e = tl.math.exp2(magnitude * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    s = y * y
    # Odd series near 0, where 1 - e cancels.
    p = -1382.0 / 155925.0 * s + 62.0 / 2835.0
    p = p * s - 17.0 / 315.0
    p = p * s + 2.0 / 15.0
    p = p * s - 1.0 / 3.0
    return tl.where(magnitude < 0.3, y + y * s * p, tl.where(y < 0, -far, far))


@triton.jit
def score_terms(
    scale, softcap, alibi_ptr, alibi_batch, alibi_head, bias_ptr, bias_batch, bias_head, bias_i, bias_j, b, h, Tq, Tk,
    O: tl.constexpr,
):  # fmt: skip
    """What `scores` needs to know of one head."""
    c, cap, slope = to_unit(scale, O), 0.0, 0.0
    if SOFTCAP & O:
        c, cap = scale / softcap, to_unit(softcap, O)
    if ALIBI & O:
        slope = to_unit(tl.load(alibi_ptr + b * alibi_batch + h * alibi_head), O)
    if BIAS & O:
        bias_ptr += b * bias_batch + h * bias_head
    else:
        bias_ptr = 0  # Triton 3.6 returns no None
    return c, cap, slope, bias_ptr, bias_i, bias_j, Tq, Tk


@triton.jit
def distance(i, j, Tq, Tk):
    return tl.abs(i + (Tk - Tq) - j).to(tl.float32)


@triton.jit
def scores(qk, i, j, terms, band, MASKED: tl.constexpr, O: tl.constexpr):
    """(score, tanh of it if it is capped, whether seen); i and j broadcast to qk. Unseen pairs are not masked yet."""
    c, cap, slope, bias_ptr, bias_i, bias_j, Tq, Tk = terms
    t = qk * c
    s = t
    seen = j < Tk
    if MASKED:
        seen = sees(i, j, Tk, band, O)
    if SOFTCAP & O:
        t = _tanh(t)
        s = t * cap
    if BIAS & O:
        at = bias_ptr + i.to(tl.int64) * bias_i + j.to(tl.int64) * bias_j
        bias = tl.load(at, mask=(i < Tq) & (j < Tk), other=0.0).to(tl.float32)
        s += bias
        seen = seen & (bias != float("-inf"))
    if ALIBI & O:
        s -= slope * distance(i, j, Tq, Tk)
    return s, t, seen


@triton.jit
def sink_share(lse, sink):
    """What a sink leaves of a row of probabilities: sigmoid(lse - sink), natural."""
    return 1.0 / (1.0 + tl.exp(sink - lse))


@triton.jit
def dropout_terms(seed_ptr, threshold, rescale, b, h, O: tl.constexpr):
    seed = 0
    if DROPOUT & O:
        seed = tl.load(seed_ptr)
        h += tl.load(seed_ptr + 1).to(tl.int32)  # of the first head
    return seed, tl.cast(threshold, tl.uint32), rescale, b, h


@triton.jit
def _words(i, group, dropout):
    """The four random words of pairs (i, 4 * group ..): philox with key seed and counter (group, i, h, b)."""
    seed, _threshold, _rescale, b, h = dropout
    # Adding to a zero of the block's shape makes every counter word as large as the block.
    zero = (i ^ i) + (group ^ group)
    c0, c1 = (group + zero).to(tl.uint32), (i + zero).to(tl.uint32)
    c2, c3 = (h + zero).to(tl.uint32), (b + zero).to(tl.uint32)
    return tl.philox(seed, c0, c1, c2, c3)


@triton.jit
def kept(rows, start, dropout, BN: tl.constexpr):
    """(rows, BN) of dropout for keys start .. start + BN - 1, start a multiple of 4: one philox for four keys."""
    _seed, threshold, _rescale, _b, _h = dropout
    w0, w1, w2, w3 = _words(rows[:, None], (start // 4 + tl.arange(0, BN // 4))[None, :], dropout)
    even = tl.interleave((w0 > threshold).to(tl.int8), (w2 > threshold).to(tl.int8))
    odd = tl.interleave((w1 > threshold).to(tl.int8), (w3 > threshold).to(tl.int8))
    return tl.interleave(even, odd) != 0


@triton.jit
def kept_pairs(i, j, dropout):
    """The same for any pairs: i and j broadcast against each other."""
    _seed, threshold, _rescale, _b, _h = dropout
    w0, w1, w2, w3 = _words(i, j // 4, dropout)
    word = tl.where(j % 4 < 2, tl.where(j % 4 == 0, w0, w1), tl.where(j % 4 == 2, w2, w3))
    return word > threshold


@triton.jit
def gradients(p, dp, t, seen, keep, delta, share, rescale, MASKED: tl.constexpr, O: tl.constexpr):
    """(weight of v, gradient of the score, of scale * q.k): of p, and of dp = dout.v. Rows' numbers broadcast."""
    weight = p
    if SINKS & O:
        weight = weight * share
    if DROPOUT & O:
        weight = weight * tl.where(keep, rescale, 0.0)  # NaN stays
    if (SINKS | DROPOUT) & O:
        ds = weight * dp - p * delta
    else:
        ds = p * (dp - delta)
    dqk = ds
    if SOFTCAP & O:
        dqk = ds * (1.0 - t * t)
    if MASKED:
        weight = tl.where(seen, weight, 0.0)
        ds = tl.where(seen, ds, 0.0)
        dqk = tl.where(seen, dqk, 0.0)
    return weight, ds, dqk
