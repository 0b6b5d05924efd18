"""A GPT: RMS norm, rotary positions, grouped-query attention, gated MLP, tied or untied head.

Every op is ours but the look-up of the embedding.

Shape suffixes: B batch, T tokens, N = B·T rows, C channels, H query heads, G key/value heads, D head dim, V
vocabulary.

The residual stream is never added on its own: each norm takes the branch that came before it and the stream, and
returns the normed sum and the sum (`tw.rms_norm(branch, weight, residual=stream)`), which saves a pass forward and
one backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.parallel.tensor import ColumnParallelLinear, column_linears
from trainwright.parallel.vocab import (
    VocabParallelEmbedding,
    tied_logits,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class GPTConfig:
    vocab: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    tied: bool = True
    rope_theta: float = 10000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rope_table(config: GPTConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle position · theta^(-2i/D), each (context, D/2), fp32."""
    pairs = torch.arange(config.head_dim // 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-2.0 * pairs / config.head_dim)
    position = torch.arange(config.context, device=device, dtype=torch.float32)
    angle = torch.outer(position, frequency)
    return angle.cos(), angle.sin()


class Cache:
    """Keys and values of the tokens so far, for sampling: (B, context, G, D) per layer."""

    def __init__(self, config: GPTConfig, batch: int, like: Tensor) -> None:
        shape = (config.layers, batch, config.context, config.kv_heads, config.head_dim)
        self.k, self.v, self.length = like.new_zeros(shape), like.new_zeros(shape), 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.shape[1]
        self.k[layer, :, self.length : end], self.v[layer, :, self.length : end] = k, v
        return self.k[layer, :, :end], self.v[layer, :, :end]


def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Several linear layers of one x; what is split over ranks sums the gradient of x once."""
    if isinstance(layers[0], ColumnParallelLinear):
        return column_linears(x, layers)  # type: ignore[arg-type]
    return [layer(x) for layer in layers]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.layer = layer
        self.q = tw.nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k = tw.nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = tw.nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = tw.nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.kv_of: list[int] | None = (
            None  # key/value head of every query head, where not H/G each (split.py)
        )

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        B, T, _ = x_BTC.shape
        parts = project(x_BTC, self.q, self.k, self.v)
        q, k, v = (y.view(B, T, y.shape[-1] // self.head_dim, self.head_dim) for y in parts)
        q, k = tw.rope(q, k, cos, sin)
        if self.kv_of is not None:
            k, v = k[:, :, self.kv_of], v[:, :, self.kv_of]
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        out_BTHD = tw.flash_attention(q, k, v, causal=True)
        return self.out(out_BTHD.flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = tw.nn.Linear(config.dim, config.hidden, bias=False)
        self.up = tw.nn.Linear(config.dim, config.hidden, bias=False)
        self.down = tw.nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = project(x_BTC, self.gate, self.up)
        return self.down(tw.swiglu(gate, up))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = tw.nn.RMSNorm(config.dim, config.eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = tw.nn.RMSNorm(config.dim, config.eps)
        self.mlp = MLP(config)

    def forward(
        self, branch: Tensor, stream: Tensor | None, cos: Tensor, sin: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """The last branch and the stream without it; returns the same of this block. All (B, T, C)."""
        if stream is None:  # the embedding is the stream
            normed, stream = self.attention_norm(branch), branch
        else:
            normed, stream = self.attention_norm(branch, stream)
        branch = self.attention(normed, cos, sin, cache)
        normed, stream = self.mlp_norm(branch, stream)
        return self.mlp(normed), stream


class GPT(nn.Module):
    """`loss = model(tokens, targets)`, the mean over the targets that are not `ignore_index`.

    Args:
        config: sizes.
        seed: of the weights, which are drawn in fp32 and then rounded to dtype.
        dtype: of weights and activations.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: GPTConfig, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = tw.nn.RMSNorm(config.dim, config.eps)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        initialise(self, seed)
        self.to(dtype)
        for name, table in zip(("cos", "sin"), rope_table(config)):  # stay fp32
            self.register_buffer(name, table, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Normed states (B, T, C) before the head. With a cache, `tokens_BT` continue what it holds."""
        start = 0 if cache is None else cache.length
        end = start + tokens_BT.shape[1]
        cos, sin = self.cos[start:end], self.sin[start:end]
        branch, stream = self.embedding(tokens_BT), None
        for block in self.blocks:
            branch, stream = block(branch, stream, cos, sin, cache)
        if cache is not None:
            cache.length = end
        normed, _ = self.norm(branch, stream)
        return normed

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_NC = self.hidden(tokens_BT).flatten(0, 1)
        if isinstance(self.embedding, VocabParallelEmbedding):
            tied = self.head is None
            logits = tied_logits(hidden_NC, self.embedding) if tied else self.head(hidden_NC)
            return vocab_parallel_cross_entropy(
                logits, targets_BT.flatten(), group=self.embedding.group
            )
        return tw.linear_cross_entropy(hidden_NC, self.head_weight, targets_BT.flatten())

    @torch.no_grad()
    def generate(
        self, prompt: list[int], count: int, temperature: float, seed: int, stop: int | None = None
    ) -> list[int]:
        """Up to `count` sampled tokens after `prompt`; ends early at `stop` or when the context is full."""
        generator = torch.Generator().manual_seed(seed)
        cache = Cache(self.config, 1, self.embedding.weight)
        tokens, new = list(prompt), []
        for _ in range(min(count, self.config.context - len(prompt))):
            feed = torch.tensor([tokens[cache.length :]], device=self.embedding.weight.device)
            last_NC = self.hidden(feed, cache)[:, -1]
            logits = tw.linear(last_NC, self.head_weight).float().cpu()
            probability = torch.softmax(logits / temperature, -1)
            token = int(torch.multinomial(probability, 1, generator=generator))
            if token == stop:
                break
            tokens.append(token)
            new.append(token)
        return new


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Normal(0, 0.02); what writes to the residual stream shrinks with its depth. Norms stay at 1."""
    generator = torch.Generator().manual_seed(seed)
    writers = sum(
        name.endswith(("out.weight", "down.weight")) for name, _ in model.named_parameters()
    )
    for name, p in model.named_parameters():
        if p.dim() > 1:
            std = (
                0.02 / math.sqrt(writers) if name.endswith(("out.weight", "down.weight")) else 0.02
            )
            p.copy_(torch.randn(p.shape, generator=generator) * std)
