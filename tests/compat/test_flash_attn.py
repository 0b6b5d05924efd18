"""trainwright.compat.flash_attn: flash-attn's signatures and meaning."""

import functools
import inspect
import math

import pytest
import torch
from numerics import same_bits
from trainwright.compat import flash_attn
from trainwright.compat.flash_attn import bert_padding

NAN, INF = float("nan"), float("inf")
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "causal window": {"causal": True, "window_size": (3, -1)},
    "no window": {"window_size": (-7, -1)},
    "softcap": {"softcap": 5.0, "softmax_scale": 0.7},
    "alibi": {"causal": True, "alibi_slopes": torch.rand(2, 4)},
    "dropout": {"dropout_p": 0.3},
}


def plain(
    q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, softmax_scale=None
):
    """flash-attn's documentation, element by element in fp64."""
    (Tq, H, D), (Tk, G, _) = q.shape, k.shape
    out = torch.zeros(Tq, H, v.shape[2], dtype=torch.float64)
    for h in range(H):
        for i in range(Tq):
            scores = []
            for j in range(Tk):
                at, (left, right) = i + Tk - Tq, window_size
                s = (q[i, h] @ k[j, h * G // H]).item() * (softmax_scale or D**-0.5)
                s = softcap * math.tanh(s / softcap) if softcap else s
                s -= 0.0 if alibi_slopes is None else alibi_slopes[h].item() * abs(at - j)
                hidden = (
                    (causal and j > at)
                    or (left >= 0 and j < at - left)
                    or (right >= 0 and j > at + right)
                )
                scores.append(-INF if hidden else s)
            if scores and max(scores) > -INF:
                out[i, h] = (
                    torch.softmax(torch.tensor(scores, dtype=torch.float64), 0) @ v[:, h * G // H]
                )
    return out


def dense(seed=0, Tq=9, Tk=9, H=4, G=4):
    torch.manual_seed(seed)
    return [
        torch.randn(2, t, h, 8, dtype=torch.float64, requires_grad=True)
        for t, h in ((Tq, H), (Tk, G), (Tk, G))
    ]


@pytest.mark.parametrize("case", [c for c in OPTIONS if c != "dropout"])
def test_dense_is_what_flash_attn_documents(case):
    q, k, v = dense(Tq=7, Tk=9, G=2)
    options = OPTIONS[case]
    out = flash_attn.flash_attn_func(q, k, v, **options)
    for b in range(2):
        one = {n: x[b] if n == "alibi_slopes" else x for n, x in options.items()}
        torch.testing.assert_close(out[b], plain(q[b], k[b], v[b], **one))


@pytest.mark.parametrize("case", OPTIONS)
def test_packed_forms_are_the_plain_ones(case):
    options = OPTIONS[case]
    q, k, v = dense()
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    kv, qkv = torch.stack(rows[1:], 1), torch.stack(rows, 1)
    calls = {
        "plain": lambda: flash_attn.flash_attn_func(q, k, v, **options),
        "kv": lambda: flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options),
        "qkv": lambda: flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options),
        "varlen": lambda: flash_attn.flash_attn_varlen_func(*rows, starts, starts, 9, 9, **options),
        "varlen kv": lambda: flash_attn.flash_attn_varlen_kvpacked_func(
            rows[0], kv, starts, starts, 9, 9, **options
        ),
        "varlen qkv": lambda: flash_attn.flash_attn_varlen_qkvpacked_func(
            qkv, starts, 9, **options
        ),
    }
    results = {}
    for name, call in calls.items():
        torch.manual_seed(1)
        out = call()
        grads = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
        results[name] = [out.reshape(2, 9, 4, 8), *grads]
    for name, result in results.items():
        torch.testing.assert_close(result, results["plain"], msg=name)


def test_return_attn_probs_gives_lse_and_no_matrix():
    q, k, v = dense()
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (2, 4, 9) and probabilities is None
    starts = torch.tensor([0, 9], dtype=torch.int32)
    rows = [x[0] for x in (q, k, v)]
    out_, lse_, _ = flash_attn.flash_attn_varlen_func(
        *rows, starts, starts, 9, 9, return_attn_probs=True
    )
    torch.testing.assert_close((out_, lse_), (out[0], lse[0]))


TAIL = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
PARAMETERS = {
    "flash_attn_func": f"q k v {TAIL}",
    "flash_attn_kvpacked_func": f"q kv {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv {TAIL}",
    "flash_attn_varlen_func": f"q k v {PACKED} {TAIL} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv {PACKED} {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {TAIL}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
    "return_softmax_lse",
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_positional_arguments_are_flash_attn_s(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == PARAMETERS[name].split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


# ---- kv cache

# id: options of the call; n new tokens are appended
CACHE = {
    "read only": {"new": 0},
    "append": {"new": 3, "causal": True},
    "one token": {"Tq": 1, "new": 1, "causal": True},
    "rotary": {"new": 3, "causal": True, "rotary": True},
    "rotary, all queries at one position": {"new": 3, "rotary": True, "rotary_interleaved": False},
    "batch index": {"new": 2, "causal": True, "index": True},
    "left padding": {"new": 2, "causal": True, "leftpad": True},
    "pages": {"new": 3, "causal": True, "pages": True, "rotary": True},
    "window, softcap and alibi": {"new": 3, "window_size": (4, 0), "softcap": 3.0, "alibi_slopes": torch.rand(3, 4)},
}  # fmt: skip
LENGTHS = torch.tensor([5, 0, 9], dtype=torch.int32)


def flat_pages(x):
    """A paged cache, whose pages lie in reverse, as (B, T, G, D)."""
    return x.flip(0).reshape(4, 16, 2, 8)


def rotate(x, at, table, interleaved):
    """x (T, heads, D) by the angles table[at] (T, R/2)."""
    angle = table[at][:, None]
    half = table.shape[1]
    rotated = x[..., : 2 * half]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    turned = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("case", CACHE)
def test_kvcache_is_attention_over_what_it_holds(case):
    options = dict(CACHE[case])
    Tq, new = options.pop("Tq", 3), options.pop("new")
    room, B, rotary = 16, 3, options.pop("rotary", False)
    make = functools.partial(torch.randn, dtype=torch.float64)
    q, k_cache, v_cache = make(B, Tq, 4, 8), make(4, room, 2, 8), make(4, room, 2, 8)
    index = (
        torch.tensor([2, 0, 3], dtype=torch.int32)
        if options.pop("index", False)
        else torch.arange(3).int()
    )
    leftpad = torch.tensor([2, 0, 4], dtype=torch.int32) if options.pop("leftpad", False) else None
    caches, table = [k_cache, v_cache], None
    if options.pop("pages", False):
        caches = [x.reshape(16, 4, 2, 8).flip(0).contiguous() for x in caches]
        table = (15 - torch.arange(12, dtype=torch.int32)).view(3, 4)
    elif case != "batch index":
        caches = [x[:3].clone() for x in caches]
    before = [x.clone() for x in caches]
    k, v = (make(B, new, 2, 8), make(B, new, 2, 8)) if new else (None, None)
    angles = torch.rand(room, 3, dtype=torch.float64)
    given = dict(options)
    if rotary:
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    if case == "batch index":
        given["cache_batch_idx"] = index
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=LENGTHS, cache_leftpad=leftpad, block_table=table, return_softmax_lse=True,
        **given,
    )  # fmt: skip

    interleaved = options.pop("rotary_interleaved", True)
    moving = options.get("causal", False) or "window_size" in options
    held, old = (
        [flat_pages(x) if table is not None else x for x in some] for some in (caches, before)
    )
    for b in range(B):
        n, first, row = int(LENGTHS[b]), 0 if leftpad is None else int(leftpad[b]), int(index[b])
        keys, values = (x[row, first:n] for x in old)
        query = q[b]
        if new:
            fresh = rotate(k[b], n + torch.arange(new), angles, interleaved) if rotary else k[b]
            torch.testing.assert_close(held[0][row, n : n + new], fresh)
            assert torch.equal(held[1][row, n : n + new], v[b])
            keys, values = torch.cat([keys, fresh]), torch.cat([values, v[b]])
        if rotary:
            query = rotate(query, n + torch.arange(Tq) * moving, angles, interleaved)
        one = {n: x[b] if n == "alibi_slopes" else x for n, x in options.items()}
        torch.testing.assert_close(out[b], plain(query, keys, values, **one))
        for x, y in zip(held, old):  # nothing else was written
            assert torch.equal(x[row, :n], y[row, :n]) and torch.equal(
                x[row, n + new :], y[row, n + new :]
            )
    assert lse.shape == (B, 4, Tq) and not out.requires_grad


def test_kvcache_of_any_strides_and_one_length_for_all():
    cache = torch.zeros(2, 2, 8, 1, 4).unbind(1)  # neither merges its first two dims
    x = torch.randn(2, 3, 1, 4)
    out = flash_attn.flash_attn_with_kvcache(x, *cache, x, x, cache_seqlens=2, causal=True)
    assert torch.equal(cache[0][:, 2:5], x) and torch.equal(cache[1][:, 2:5], x)
    contiguous = [c.clone() for c in cache]
    assert same_bits(
        out, flash_attn.flash_attn_with_kvcache(x, *contiguous, x, x, cache_seqlens=2, causal=True)
    )


def test_kvcache_without_sequences():
    x, cache = torch.ones(0, 3, 1, 4), torch.ones(0, 8, 1, 4)
    assert flash_attn.flash_attn_with_kvcache(x, cache, cache, cache_seqlens=3).shape == (
        0,
        3,
        1,
        4,
    )


X, CACHED = torch.ones(2, 3, 4, 8), torch.ones(2, 6, 2, 8)
NEW = torch.ones(2, 3, 2, 8)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"k": NEW, "v": NEW}, ValueError, "cache_seqlens: expected an int or a tensor together with k"),
        ({"k": NEW, "cache_seqlens": 0}, ValueError, "v: expected a tensor if and only if k"),
        ({"k": NEW, "v": NEW, "cache_seqlens": 4}, ValueError, "cache_seqlens: expected lengths .* fit in 6"),
        ({"cache_seqlens": torch.tensor([1, 7])}, ValueError, "cache_seqlens: expected lengths .* fit in 6"),
        ({"cache_seqlens": 1.0}, TypeError, "cache_seqlens: expected None, an int or a tensor"),
        ({"k_cache": CACHED[:, :, :, :4]}, ValueError, r"k_cache: expected shape \(any, any, any, 8\)"),
        ({"v_cache": CACHED[:, :5]}, ValueError, r"v_cache: expected shape \(2, 6, 2, any\)"),
        ({"k_cache": CACHED[:1], "v_cache": CACHED[:1]}, ValueError, r"k_cache: expected shape \(2, any"),
        ({"rotary_cos": torch.ones(6, 2)}, ValueError, "rotary_sin: expected a table if and only if"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size: expected"),
        ({"softcap": -1.0}, ValueError, "softcap: expected at least 0"),
        ({"cache_leftpad": torch.tensor([0, 5]), "cache_seqlens": 4}, ValueError, "cache_leftpad: expected positions"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_kvcache_bad_arguments(changed, error, text):
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_with_kvcache(
            **{"q": X, "k_cache": CACHED, "v_cache": CACHED, **changed}
        )


@pytest.mark.parametrize("case", ["plain", "causal window", "softcap", "alibi"])
def test_varlen_reads_pages(case):
    torch.manual_seed(0)
    starts_q, starts_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 5, 7, 16])
    q = torch.randn(7, 4, 8, dtype=torch.float64, requires_grad=True)
    pages = [torch.randn(9, 4, 2, 8, dtype=torch.float64) for _ in "kv"]
    table = torch.tensor([[7, 2, 99], [4, -1, 0], [0, 8, 3]])  # 5, 2 and 9 keys: 2, 1 and 3 pages
    used = [(7, 4), (2, 1), (4, 2), (0, 4), (8, 4), (3, 1)]  # page, keys in it
    options = dict(OPTIONS[case])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(3, 4, dtype=torch.float64)
    for x in pages:  # what no sequence holds must not matter
        held = torch.zeros(9, 4, dtype=torch.bool)
        for page, keys in used:
            held[page, :keys] = True
        x[~held] = NAN
        x.requires_grad_()
    k, v = (torch.cat([x[page, :keys] for page, keys in used]) for x in pages)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 4, 9, **options)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, *pages), upstream)
    out = flash_attn.flash_attn_varlen_func(
        q, *pages, starts_q, starts_k, 4, 9, block_table=table, **options
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, (q, *pages), upstream), wanted)


@pytest.mark.parametrize(
    ("starts", "table", "text"),
    [
        (
            [0, 9],
            [[0, 1]],
            "cu_seqlens_k: expected sequences of at most 8 keys, 2 pages of 4, got 9",
        ),
        ([0, 5], [[0, 3]], "block_table: expected pages from 0 to 2, got 3"),
        ([0, 5, 6], [[0, 1]], r"cu_seqlens_k: expected shape \(2\), got \(3,\)"),
    ],
    ids=["too long", "no such page", "sequences"],
)
def test_varlen_bad_pages(starts, table, text):
    q, k = torch.randn(2, 2, 8), torch.randn(3, 4, 2, 8)
    with pytest.raises(ValueError, match=text):
        flash_attn.flash_attn_varlen_func(
            q,
            k,
            k,
            torch.tensor([0, 2]),
            torch.tensor(starts),
            2,
            9,
            block_table=torch.tensor(table),
        )


def test_packed_bad_arguments():
    with pytest.raises(
        ValueError, match=r"qkv: expected shape \(B, T, 3, heads, head dim\), got \(2, 3, 4, 8\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(X)
    with pytest.raises(ValueError, match=r"kv: expected shape \(tokens, 2, heads, head dim\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(X[0], X, None, None, 3, 3)


# ---- bert_padding


def test_unpad_and_pad_are_inverse_with_gradients():
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and indices.tolist() == [0, 1, 11, 12, 13, 14]
    assert starts.tolist() == [0, 2, 2, 6] and starts.dtype == torch.int32 and longest == 4
    assert used.tolist() == [2, 0, 4]
    padded = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    assert torch.autograd.gradcheck(lambda x: bert_padding.unpad_input(x, mask)[0], x)
    assert torch.autograd.gradcheck(
        lambda r: bert_padding.pad_input(r, indices, 3, 5), rows.detach().requires_grad_()
    )
    unused = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    _, indices, starts, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert (
        starts.tolist() == [0, 3, 4, 8]
        and used.tolist() == [2, 0, 4]
        and indices.tolist()[:4] == [0, 1, 2, 5]
    )
    assert torch.equal(
        bert_padding.index_first_axis(x.flatten(0, 1), indices), x.flatten(0, 1)[indices]
    )
