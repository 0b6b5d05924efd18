"""attn_implementation="trainwright" in Transformers, on tiny random models, against its eager attention."""

import copy

import pytest
import torch
import trainwright as tw
from numerics import assert_same_model

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)  # fmt: skip

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "gemma2, softcap and both kinds of layers": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=5.0, query_pre_attn_scalar=8)
    ),
    "gpt-oss, sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered():
    tw.compat.transformers.register()


def pair(case):
    """The same random model with our attention and with Transformers' eager one."""
    ours = MODELS[case]()
    with torch.no_grad():
        for p in ours.parameters():  # all that starts at 0 or 1 as well
            p.add_(0.1 * torch.randn_like(p))
    theirs = copy.deepcopy(ours)
    ours.set_attn_implementation("trainwright")
    theirs.set_attn_implementation("eager")
    return ours, theirs


PADDING = {
    "none": torch.ones(2, 11, dtype=torch.int64),
    "right": torch.tensor([[1] * 11, [1] * 6 + [0] * 5]),
    "left": torch.tensor([[0] * 4 + [1] * 7, [1] * 11]),
    "holes": torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1], [1] * 11]),
}


@pytest.mark.parametrize(
    ("case", "padding"),
    [(case, p) for case in MODELS for p in PADDING if case == "llama" or p in ("left", "holes")],
)
def test_loss_and_gradients_are_those_of_eager(case, padding):
    ours, theirs = pair(case)
    tokens, mask = torch.randint(3, 50, (2, 11)), PADDING[padding]
    labels = tokens.masked_fill(
        mask == 0, -100
    )  # nor what padding, whose logits mean nothing, predicts
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    results = []
    for model in (ours, theirs):
        result = model(input_ids=tokens, attention_mask=mask, labels=labels)
        grads = torch.autograd.grad(result.loss, list(model.parameters()), allow_unused=True)
        results.append([result.loss, result.logits[mask == 1], *grads])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_model(f"loss, logits, gradients: number {i}", a, b)


def test_the_llama_runs_on_our_op_without_a_mask():
    ours, _ = pair("llama")
    text = tw.explain(ours, input_ids=torch.randint(3, 50, (2, 11)))
    assert text.count("flash_attention (cpu, float32, D=8, Dv=8)") == 2
    text = tw.explain(
        ours, input_ids=torch.randint(3, 50, (2, 11)), attention_mask=PADDING["right"]
    )
    assert text.count("flash_attention_varlen (") == 2


@pytest.mark.parametrize(
    ("case", "cache"),
    [(c, "static" if "sliding" in c else None) for c in MODELS if "gemma" not in c],
)
def test_generates_what_eager_generates(case, cache):
    ours, theirs = pair(case)
    tokens, mask = torch.randint(3, 50, (2, 11)), PADDING["left"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "output_logits": True}
    if cache:
        options |= {"cache_implementation": cache, "disable_compile": True}
    results = [
        m.eval().generate(
            input_ids=tokens, attention_mask=mask, return_dict_in_generate=True, **options
        )
        for m in (ours, theirs)
    ]
    assert torch.equal(results[0].sequences, results[1].sequences)
    for a, b in zip(results[0].logits, results[1].logits, strict=True):
        assert_same_model("logits", a, b)


def test_packed_sequences_do_not_see_each_other():
    ours, theirs = pair("llama")
    tokens, positions = torch.randint(3, 50, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    results = [
        m(input_ids=tokens, position_ids=positions, use_cache=False).logits for m in (ours, theirs)
    ]
    assert_same_model("packed", *results)
    alone = ours(input_ids=tokens[:, 4:], use_cache=False).logits
    assert_same_model("the second sequence", results[0][:, 4:], alone)


@pytest.mark.parametrize("padding", ["none", "right"])
def test_an_encoder(padding):
    sizes = {
        n: SIZES[n]
        for n in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    ours = BertModel(BertConfig(**sizes, num_hidden_layers=2), add_pooling_layer=False).eval()
    theirs = copy.deepcopy(ours)
    ours.set_attn_implementation("trainwright")
    theirs.set_attn_implementation("eager")
    tokens, mask = torch.randint(3, 50, (2, 11)), PADDING[padding]
    results = [m(input_ids=tokens, attention_mask=mask).last_hidden_state for m in (ours, theirs)]
    assert_same_model("states", *(r[mask == 1] for r in results))


def test_compiles_without_graph_break():
    ours, _ = pair("llama")
    tokens = torch.randint(3, 50, (2, 11))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = [m(input_ids=tokens, use_cache=False).logits for m in (compiled, ours)]
    assert_same_model("logits", *results)


def test_weights_are_refused():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        tw.compat.transformers.attention_forward(
            torch.nn.Module(), x, x, x, None, output_attentions=True
        )
