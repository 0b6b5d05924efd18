"""The same GPT in plain torch, with the same parameter names: what `--compare` runs and the tests check against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.train.model import GPTConfig, initialise, rope_table


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BTHD.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x_BTHD.dtype), sin[:, None].to(x_BTHD.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = rotate(self.q(x).view(B, T, self.heads, self.head_dim), cos, sin).transpose(1, 2)
        k = rotate(self.k(x).view(B, T, self.kv_heads, self.head_dim), cos, sin).transpose(1, 2)
        v = self.v(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.eps)
        self.attention = PlainAttention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, config.eps)
        self.mlp = PlainMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class PlainGPT(nn.Module):
    """`trainwright.train.model.GPT` without a Trainwright op; a state dict of one loads into the other."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.eps)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        for name, table in zip(("cos", "sin"), rope_table(config)):
            self.register_buffer(name, table, persistent=False)
        initialise(self, seed)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        x = self.embedding(tokens_BT)
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())
