"""tw.nn.MultiheadAttention against torch's, with torch's weights."""

import pytest
import torch
import trainwright as tw
from torch import nn

# id: constructor, call; N 2, L 5, S 5 or 7
CASES = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "without bias": ({"bias": False}, {}),
    "other tokens": ({"batch_first": True}, {"S": 7}),
    "other widths": ({"kdim": 6, "vdim": 10}, {"S": 7}),
    "bias_kv": ({"add_bias_kv": True}, {"S": 7, "attn_mask": "bool", "key_padding_mask": "bool"}),
    "zero attention": ({"add_zero_attn": True, "batch_first": True}, {"attn_mask": "float"}),
    "bias_kv and zero attention": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "padding": ({"batch_first": True}, {"S": 7, "key_padding_mask": "bool"}),
    "float padding": ({}, {"S": 7, "key_padding_mask": "float"}),
    "bool mask": ({}, {"S": 7, "attn_mask": "bool"}),
    "mask per head": ({}, {"S": 7, "attn_mask": "per head"}),
    "both masks": ({}, {"S": 7, "attn_mask": "float", "key_padding_mask": "float"}),
    "causal hint": ({"batch_first": True}, {"attn_mask": "causal", "is_causal": True}),
    "causal hint and padding": ({}, {"attn_mask": "causal", "is_causal": True, "key_padding_mask": "bool"}),
    "causal hint and bias_kv": ({"add_bias_kv": True}, {"attn_mask": "causal", "is_causal": True}),
}  # fmt: skip
N, L, E, HEADS = 2, 5, 8, 4


def masks(call, S):
    made = dict(call)
    kind = made.get("attn_mask")
    if kind == "bool":
        made["attn_mask"] = (torch.rand(L, S) > 0.6).index_fill(1, torch.tensor([0]), False)
    elif kind == "per head":
        made["attn_mask"] = torch.randn(N * HEADS, L, S, dtype=torch.float64)
    elif kind == "float":
        made["attn_mask"] = torch.randn(L, S, dtype=torch.float64)
    elif kind == "causal":
        made["attn_mask"] = torch.ones(L, S, dtype=torch.bool).triu(1)
    if made.get("key_padding_mask") == "bool":
        made["key_padding_mask"] = torch.arange(S) >= torch.tensor([[S - 2], [S]])
    elif made.get("key_padding_mask") == "float":
        made["key_padding_mask"] = torch.randn(N, S, dtype=torch.float64)
    return made


def pair(constructor):
    theirs = nn.MultiheadAttention(E, HEADS, **constructor, dtype=torch.float64)
    for p in theirs.parameters():  # torch starts the biases at 0
        nn.init.normal_(p)
    ours = tw.nn.MultiheadAttention(E, HEADS, **constructor, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_is_torch_s(case, need_weights):
    constructor, call = CASES[case]
    call = dict(call)
    S = call.pop("S", L)
    ours, theirs = pair(constructor)
    widths = (E, constructor.get("kdim", E), constructor.get("vdim", E))
    shapes = [
        (N, t, w) if constructor.get("batch_first") else (t, N, w)
        for t, w in zip((L, S, S), widths)
    ]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    options = masks(call, S) | {
        "need_weights": need_weights,
        "average_attn_weights": "causal" in case,
    }
    results = []
    for module in (ours, theirs):
        out, weights = module(*inputs, **options)
        total = out.square().sum() + (0.0 if weights is None else weights.square().sum())
        leaves = [*inputs, *module.parameters()]
        results.append([out, weights, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_unbatched(same, need_weights):
    ours, theirs = pair({})
    q = torch.randn(L, E, dtype=torch.float64)
    k = q if same else torch.randn(7, E, dtype=torch.float64)
    options = {"need_weights": need_weights, "key_padding_mask": torch.arange(k.shape[0]) > 3}
    torch.testing.assert_close(ours(q, k, k, **options), theirs(q, k, k, **options))


def test_in_torch_s_encoder_layer():
    layer = nn.TransformerEncoderLayer(
        E, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    x, mask = torch.randn(N, L, E, dtype=torch.float64), torch.ones(L, L, dtype=torch.bool).triu(1)
    before = layer(x, mask, is_causal=True)
    ours = tw.nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    text = tw.explain(layer, x, mask, is_causal=True)
    assert "flash_attention (cpu, float64" in text
    torch.testing.assert_close(layer(x, mask, is_causal=True), before)


def test_dropout_only_in_training():
    module = tw.nn.MultiheadAttention(E, HEADS, dropout=0.5)
    x = torch.randn(L, N, E)
    for need_weights in (True, False):
        a, b = (module(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(a, b)
        module.eval()
        a, b = (module(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert torch.equal(a, b)
        module.train()


def test_a_query_whose_keys_are_all_padding_gives_zeros_and_finite_gradients():
    module = tw.nn.MultiheadAttention(E, HEADS, batch_first=True, bias=False)
    x = torch.randn(N, L, E, requires_grad=True)
    padding = torch.tensor([[True] * L, [False] * L])
    for need_weights in (True, False):
        out, _ = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        assert (out[0] == 0).all()
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_compiles_without_graph_break():
    module = tw.nn.MultiheadAttention(E, HEADS, batch_first=True)
    x, mask = torch.randn(N, L, E), torch.ones(L, L, dtype=torch.bool).triu(1)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    torch.testing.assert_close(compiled(x, x, x, **options), module(x, x, x, **options))


X = torch.ones(L, N, E)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"query": X[None]}, ValueError, "query: expected 2 or 3 dimensions"),
        ({"key": X[0]}, ValueError, "key: expected 2 or 3 dimensions, as query"),
        ({"key": X[..., :4]}, ValueError, r"key: expected shape \(any, 2, 8\)"),
        ({"value": X[:3]}, ValueError, r"value: expected shape \(5, 2, 8\)"),
        ({"key_padding_mask": torch.ones(L, N)}, ValueError, r"key_padding_mask: expected shape \(2, 5\)"),
        ({"key_padding_mask": torch.ones(N, L).int()}, TypeError, "key_padding_mask: expected None or a tensor"),
        ({"attn_mask": torch.ones(N, L, L)}, ValueError, r"attn_mask: expected shape \(5, 5\) or \(8, 5, 5\)"),
        ({"is_causal": True}, ValueError, "attn_mask: expected the causal mask"),
        ({"need_weights": 1}, TypeError, "need_weights: expected a bool"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_bad_arguments(changed, error, text):
    module = tw.nn.MultiheadAttention(E, HEADS)
    with pytest.raises(error, match=text):
        module(**{"query": X, "key": X, "value": X, **changed})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((10, 3), ValueError, "num_heads: expected a divisor of embed_dim, 10, got 3"),
        ((0, 1), ValueError, "embed_dim: expected at least 1, got 0"),
        (("8", 2), TypeError, "embed_dim: expected an int, got str"),
        ((8, 2, 2.0), ValueError, r"dropout: expected a probability in \[0, 1\], got 2.0"),
        ((8, 2, 0.0, True, False, False, 0), ValueError, "kdim: expected at least 1, got 0"),
        (
            (8, 2, 0.0, True, False, False, None, -3),
            ValueError,
            "vdim: expected at least 1, got -3",
        ),
    ],
    ids=str,
)
def test_a_bad_constructor_argument_is_named(arguments, error, text):
    with pytest.raises(error, match=f"MultiheadAttention: {text}"):
        tw.nn.MultiheadAttention(*arguments)
