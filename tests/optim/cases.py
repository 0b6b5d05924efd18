"""Shared by the optimizer tests: layouts, and a plain fp64 AdamW to compare with."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 4097]


def layouts(dtype=torch.float32):
    """name -> (parameter, gradient), every pair of layouts that training produces; values of order 1."""

    def r(*shape):
        return torch.randn(shape).to(dtype)

    return {
        "contiguous": (r(7, 33), r(7, 33)),
        "transposed grad": (r(16, 8), r(8, 16).t()),
        "transposed parameter": (r(16, 9).t(), r(9, 16)),
        "both transposed": (r(16, 9).t(), r(16, 9).t()),
        "channels last parameter": (r(2, 3, 4, 5).to(memory_format=torch.channels_last), r(2, 3, 4, 5)),
        "channels last grad": (r(2, 3, 4, 5), r(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "every second column": (r(9, 32)[:, ::2], r(9, 16)),
        "every second column of both": (r(9, 32)[:, ::2], r(9, 34)[:, 1:33:2]),
        "offset view": (r(300)[3:260], r(262)[5:]),
        "expanded grad": (r(6, 7), r(1).expand(6, 7)),
        "expanded rows grad": (r(5, 9), r(5, 1).expand(5, 9)),
        "permuted three dims": (r(3, 4, 5).permute(2, 0, 1), r(5, 4, 3).permute(0, 2, 1)),
        "0-dim": (r(), r()),
        "no elements": (r(0, 4), r(0, 4)),
        "no elements, strided": (r(4, 0).t(), r(0, 4)),
        "one row of a matrix": (r(5, 4)[2], r(4)),
        "larger than a run": (r(70, 33).t(), r(33, 70)),
    }  # fmt: skip


class Oracle:
    """AdamW in fp64, one parameter at a time, straight from the paper (and torch's documentation)."""

    def __init__(
        self,
        p,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        maximize=False,
    ):
        self.p = p.detach().double().clone()
        self.m, self.v, self.vmax = (torch.zeros_like(self.p) for _ in range(3))
        self.t = 0
        self.lr, self.betas, self.eps, self.wd = lr, betas, eps, weight_decay
        self.amsgrad, self.maximize = amsgrad, maximize

    def step(self, grad):
        b1, b2 = self.betas
        g = grad.detach().double() * (-1 if self.maximize else 1)
        self.t += 1
        self.p = self.p - self.lr * self.wd * self.p
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        self.vmax = torch.maximum(self.vmax, self.v)
        v = self.vmax if self.amsgrad else self.v
        m_hat, v_hat = self.m / (1 - b1**self.t), v / (1 - b2**self.t)
        self.p = self.p - self.lr * m_hat / (v_hat.sqrt() + self.eps)
