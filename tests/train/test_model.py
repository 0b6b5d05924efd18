"""Our GPT against its plain-torch twin, its FLOP count, and sampling with a cache."""

import numerics
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from trainwright.train import metrics
from trainwright.train.model import GPT, GPTConfig
from trainwright.train.reference import PlainGPT

TINY = dict(vocab=257, layers=2, dim=64, heads=4, kv_heads=2, hidden=192, context=32)


def batch(config, rows=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (rows, config.context + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 5:9] = -100
    return tokens[:, :-1], targets


def loss_and_gradients(model, x, y):
    loss = model(x, y)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_match_the_twin(tied, dtype):
    config = GPTConfig(**TINY, tied=tied)
    ours = GPT(config, seed=5, dtype=dtype)
    plain = PlainGPT(config)
    plain.load_state_dict({k: v.float() for k, v in ours.state_dict().items()})
    exact, plain = PlainGPT(config).double(), plain.to(dtype)
    exact.load_state_dict(ours.state_dict())
    assert dict(ours.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    x, y = batch(config)
    loss, gradients = loss_and_gradients(ours, x, y)
    plain_loss, plain_gradients = loss_and_gradients(plain, x, y)
    exact_loss, exact_gradients = loss_and_gradients(exact, x, y)
    numerics.assert_within_rule("loss", loss, plain_loss, exact_loss)
    for name, e in exact_gradients.items():
        numerics.assert_within_rule(name, gradients[name], plain_gradients[name], e)


def test_same_seed_same_weights():
    a, b = GPT(GPTConfig(**TINY), seed=3), PlainGPT(GPTConfig(**TINY), seed=3)
    assert all(torch.equal(p, b.state_dict()[k]) for k, p in a.state_dict().items())
    assert not torch.equal(a.embedding.weight, GPT(GPTConfig(**TINY), seed=4).embedding.weight)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flops_per_token_against_torchs_counter(kv_heads):
    config = GPTConfig(**{**TINY, "kv_heads": kv_heads})
    x, y = batch(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        PlainGPT(config)(x, y).backward()
    T = config.context
    # torch's attention multiplies the whole score matrix; ours counts the causal half with its diagonal
    pairs = 12 * config.layers * config.heads * config.head_dim * T
    ours = metrics.flops_per_token(config)
    assert counter.get_total_flops() / x.numel() == ours + pairs - pairs * (T + 1) / (2 * T)


def test_cached_sampling_is_the_full_forward():
    config = GPTConfig(**TINY)
    model = GPT(config, seed=1)
    for p in model.parameters():
        p.data *= 4  # far from uniform, so that a wrong position shows
    prompt = [256, 100, 101]
    new = model.generate(prompt, 12, 1e-4, seed=0)  # greedy, but for ties
    tokens = list(prompt)
    for token in new:
        hidden = model.hidden(torch.tensor([tokens]))[0, -1]
        assert int((hidden @ model.head_weight.T).argmax()) == token
        tokens.append(token)
    assert len(model.generate(prompt, 1000, 1.0, seed=0)) == config.context - 3
    assert model.generate(prompt, 20, 1.0, seed=7) == model.generate(prompt, 20, 1.0, seed=7)
    stopped = model.generate(prompt, 12, 1e-4, seed=0, stop=new[4])
    assert stopped == new[: new.index(new[4])]
