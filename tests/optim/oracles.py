"""Every optimizer in fp64, one parameter at a time, straight from its paper or torch's documentation."""

import torch


class Oracle:
    defaults: dict = {}  # noqa: RUF012
    common = {"lr": 1e-3, "weight_decay": 0.0, "maximize": False, "betas": (0.9, 0.999), "eps": 1e-8}  # noqa: RUF012  # fmt: skip

    def __init__(self, p, **options):
        self.start = p.detach().double().clone()
        self.p = self.start.clone()
        self.options = {**self.common, **self.defaults, **options}
        self.t = 0
        self.state = {}

    def zeros(self, name):
        return self.state.setdefault(name, torch.zeros_like(self.p))

    def step(self, grad):
        o = self.options
        self.t += 1
        self.update(o, grad.detach().double() * (-1 if o["maximize"] else 1))

    def moments(self, o, g):
        b1, b2 = o["betas"]
        m, v = self.zeros("m"), self.zeros("v")
        self.state["m"] = m = b1 * m + (1 - b1) * g
        self.state["v"] = v = b2 * v + (1 - b2) * g * g
        return m, v

    def unbiased(self, o, m, v):
        b1, b2 = o["betas"]
        return m / (1 - b1**self.t), v / (1 - b2**self.t)


class Adam(Oracle):
    defaults = {"amsgrad": False, "decoupled_weight_decay": False}  # noqa: RUF012

    def update(self, o, g):
        if o["decoupled_weight_decay"]:
            self.p = self.p - o["lr"] * o["weight_decay"] * self.p
        else:
            g = g + o["weight_decay"] * self.p
        m, v = self.moments(o, g)
        if o["amsgrad"]:
            v = self.state["h"] = torch.maximum(self.zeros("h"), v)
        m, v = self.unbiased(o, m, v)
        self.p = self.p - o["lr"] * m / (v.sqrt() + o["eps"])


class AdamW(Adam):
    defaults = {"amsgrad": False, "decoupled_weight_decay": True, "weight_decay": 1e-2}  # noqa: RUF012


class SGD(Oracle):
    defaults = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}  # noqa: RUF012

    def update(self, o, g):
        g = g + o["weight_decay"] * self.p
        if o["momentum"]:
            b = g if self.t == 1 else o["momentum"] * self.state["b"] + (1 - o["dampening"]) * g
            self.state["b"] = b
            g = g + o["momentum"] * b if o["nesterov"] else b
        self.p = self.p - o["lr"] * g


class RMSprop(Oracle):
    defaults = {"alpha": 0.99, "momentum": 0.0, "centered": False}  # noqa: RUF012

    def update(self, o, g):
        g = g + o["weight_decay"] * self.p
        v = self.state["v"] = o["alpha"] * self.zeros("v") + (1 - o["alpha"]) * g * g
        if o["centered"]:
            a = self.state["a"] = o["alpha"] * self.zeros("a") + (1 - o["alpha"]) * g
            v = v - a * a
        g = g / (v.sqrt() + o["eps"])
        if o["momentum"]:
            g = self.state["b"] = o["momentum"] * self.zeros("b") + g
        self.p = self.p - o["lr"] * g


class Lion(Oracle):
    defaults = {"betas": (0.9, 0.99)}  # noqa: RUF012

    def update(self, o, g):
        b1, b2 = o["betas"]
        m = self.zeros("m")
        self.p = (1 - o["lr"] * o["weight_decay"]) * self.p
        self.p = self.p - o["lr"] * (b1 * m + (1 - b1) * g).sign()
        self.state["m"] = b2 * m + (1 - b2) * g


class Lamb(Oracle):
    defaults = {"eps": 1e-6}  # noqa: RUF012

    def update(self, o, g):
        m, v = self.unbiased(o, *self.moments(o, g))
        u = m / (v.sqrt() + o["eps"]) + o["weight_decay"] * self.p
        norms = self.p.norm(), u.norm()
        ratio = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
        self.p = self.p - o["lr"] * ratio * u


ORACLES = {c.__name__: c for c in (AdamW, Adam, SGD, RMSprop, Lion, Lamb)}
