"""Calls of the optimizer ops in every storage format, for tests that compare backends bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from importlib import import_module

import torch
from trainwright.ops import _optimizer_formats as formats
from trainwright.ops._optimizer import Spec, needs, pack_spec, unpack_spec

OPS = {
    name: import_module(f"trainwright.ops.{name}") for name in ("adamw", "adam", "sgd", "rmsprop", "lion", "lamb")
}  # fmt: skip
NAMES = tuple(OPS)
# Values that make every term of the formula count.
HYPER = {"lr": 0.05, "beta1": 0.9, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.1, "decoupled": 0.0, "momentum": 0.8,
         "dampening": 0.25, "nesterov": 1.0, "alpha": 0.9, "maximize": 0.0}  # fmt: skip
MASTERS = {"none": formats.NO_MASTER, "fp32": formats.FP32_MASTER, "split16": formats.SPLIT16_MASTER}  # fmt: skip
STATES = {"full": formats.FULL_STATE, "bf16": formats.BF16_STATE, "int8": formats.INT8_STATE}


@dataclass(frozen=True)
class Format:
    dtype: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    master: str = "none"
    state: str = "full"
    stochastic: bool = False

    def __str__(self):
        words = [str(self.dtype)[6:], str(self.grad)[6:], self.master, self.state]
        return "-".join(words) + "-stochastic" * self.stochastic


def product():
    """Every combination that has a meaning."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dtype, grad, master, state, stochastic in itertools.product(
        dtypes, dtypes, MASTERS, STATES, (False, True)
    ):
        half = dtype in (torch.bfloat16, torch.float16)
        if (
            (master == "none" or half)
            and (master != "split16" or dtype is torch.bfloat16)
            and (dtype is not torch.float64 or (state == "full" and not stochastic))
        ):
            yield Format(dtype, grad, master, state, stochastic)


PRODUCT = tuple(product())
# A few that together use every format, for backends that are slow to run.
SOME = (
    Format(),
    Format(torch.float64, torch.float32),
    Format(torch.bfloat16, torch.bfloat16, "fp32"),
    Format(torch.bfloat16, torch.bfloat16, "split16", "bf16", True),
    Format(torch.bfloat16, torch.float16, "none", "int8", True),
    Format(torch.float16, torch.float32, "none", "bf16", True),
    Format(torch.float32, torch.bfloat16, "none", "int8"),
)


def pairs_of(forms):
    """A few of them in which every two of their properties that occur together do so."""
    chosen = []

    def pairs(form):
        return set(itertools.combinations(enumerate(map(str, vars(form).values())), 2))

    rest = set().union(*map(pairs, forms))
    while rest:
        best = max(forms, key=lambda form: len(pairs(form) & rest))
        chosen.append(best)
        rest -= pairs(best)
    return chosen


@dataclass
class Case:
    """The arguments of one call, for several tensors of one format."""

    name: str
    format: Format
    params: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    masters: list = field(default_factory=list)
    states: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    spec: list = field(default_factory=list)
    offsets: list = field(default_factory=list)
    hyper: torch.Tensor = None
    control: torch.Tensor = None
    seed: int = 1234567890123
    lost: torch.Tensor = None

    def clone(self):
        """Tensors of their own, of the same strides."""

        def copy(t):
            if not isinstance(t, torch.Tensor):
                return t
            base = t._base if t._base is not None else t
            return base.clone().as_strided(t.shape, t.stride(), t.storage_offset())

        def copies(v):
            return [copy(x) for x in v] if isinstance(v, list) else copy(v)

        return Case(**{k: copies(v) for k, v in vars(self).items()})

    def run(self, backend, steps=1):
        table = OPS[self.name].STEP
        for _ in range(steps):
            table[backend](
                self.params, self.grads, self.masters, self.states, self.steps, self.spec, self.offsets, self.hyper,
                self.control, self.seed, self.lost,
            )  # fmt: skip
        return self

    def results(self):
        extra = [] if self.lost is None else [self.lost]
        return [*self.params, *self.masters, *self.states, *self.steps, *extra]

    def needs(self):
        return needs([unpack_spec(s) for s in self.spec], self.lost is not None)


def encode(form, x, signed):
    """x as the tensors that store it."""
    if form == "int8":
        return list(formats.int8_encode(x.float(), signed, None))
    return [x.to(torch.bfloat16) if form == "bf16" else x]


def make(name, shapes, form, *, flags=7, lost=True, step=3.0, seed=0, generator=None, **hyper):
    """A call in the middle of a run: parameters `shapes` (or tensors to use as they are) with states of order 1."""
    op = OPS[name].OP
    generator = generator or torch.Generator().manual_seed(seed)

    def randn(shape, scale=1.0):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    case = Case(name, form)
    acc = torch.float64 if form.dtype is torch.float64 else torch.float32
    present = op.present(flags)
    for shape in shapes:
        p = shape.to(form.dtype) if isinstance(shape, torch.Tensor) else randn(shape).to(form.dtype)
        if form.master == "fp32":
            exact = p.float() + randn(p.shape).float() * 1e-3 * p.float().abs()
            p.copy_(exact)
            case.masters.append(exact)
        elif form.master == "split16":
            exact = p.float() + randn(p.shape).float() * 1e-3 * p.float().abs()
            high, low = formats.split16(exact)
            p.copy_(high)
            case.masters.append(low)
        case.params.append(p)
        case.grads.append(randn(p.shape).to(form.grad))
        for s in present:
            x = randn(p.shape, 0.5).to(acc)
            case.states += encode(form.state, x if s.signed else x.square(), s.signed)
        case.steps.append(torch.full((), step, dtype=torch.float64))
        known = flags & sum(s.flag for s in op.states)
        spec = Spec(0, known, form.stochastic, STATES[form.state], MASTERS[form.master])
        case.spec.append(pack_spec(spec))
        case.offsets.append(0)
    case.hyper = torch.tensor([[{**HYPER, **hyper}[k] for k in op.hyper]], dtype=torch.float64)
    case.lost = torch.zeros(2, dtype=torch.float64) if lost else None
    return case
