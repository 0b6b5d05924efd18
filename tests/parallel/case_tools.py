"""What the cases that run in the ranks share: models, batches, and comparisons across ranks."""

import itertools

import torch
import torch.distributed as dist
from numerics import parallel_close
from torch import nn
from trainwright.parallel import DataParallel

TIMEOUT = 20.0


def wrap(module, **options):
    return DataParallel(module, **{"timeout": TIMEOUT, **options})


def mlp(*sizes, dtype=torch.float64, bias=True):
    torch.manual_seed(1)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(rows, columns, dtype=torch.float64, seed=7):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share(x, rank, world, sizes=None):
    """This rank's rows; `sizes` gives each rank's number of rows."""
    if sizes is None:
        return x[rank::world]
    start = sum(sizes[:rank])
    return x[start : start + sizes[rank]]


def grads(module):
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def everyone(value):
    """The value of each rank."""
    result = [None] * dist.get_world_size()
    dist.all_gather_object(result, value)
    return result


def assert_same_on_all_ranks(tensors):
    for other in everyone(tensors):
        for name, x in tensors.items():
            y = other[name]
            assert (x is None) == (y is None), name
            assert x is None or torch.equal(x, y), name


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert (x is None) == (y is None), name
        assert x is None or (x.dtype == y.dtype and x.shape == y.shape), name
        assert x is None or parallel_close("averaged, float64", x, y), f"{name}: {x} and {y}"


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] is None) == (b[name] is None), name
        assert a[name] is None or torch.equal(a[name], b[name]), name
