"""A step of the optimizers on CUDA, on the virtual GPU: one launch for any number of tensors, whose table is filled
anew only when something moved; and what a captured graph may not do."""

import pytest
import torch
import trainwright as tw
import trainwright.optim._base as base
import trainwright.optim._hyper as hyper
import vgpu_backend
from numerics import same_bits

MANY = 1000


def leaves(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + i % 7, generator=generator).requires_grad_() for i in range(count)]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.normal_(generator=generator)


@pytest.fixture
def launches():
    """The kernels that ran since the list was last cleared."""
    runtime, names = vgpu_backend.runtime(), []
    runtime.watch = lambda name, report: names.append(name)
    yield names
    runtime.watch = None


def contents(optimizer):
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [t.detach() for t in [*optimizer.param_groups[0]["params"], *states]]


@pytest.mark.parametrize("where", ["vgpu"])
def test_a_thousand_small_tensors_are_one_launch(where, launches):
    ours, theirs = leaves(MANY), leaves(MANY)
    mine = tw.optim.AdamW(ours, lr=0.1, backend="vgpu")
    other = tw.optim.AdamW(theirs, lr=0.1, backend="cpu")
    counts, kept = [], []
    for step in range(5):
        for params, optimizer in ((ours, mine), (theirs, other)):
            if step == 3:  # one address of a thousand
                kept.append(params[MANY // 2].grad)
                params[MANY // 2].grad = None
            set_gradients(params, step)
            launches.clear()
            optimizer.step()
            if optimizer is mine:
                counts.append(["rows" in name for name in launches])
    fill = [True] * -(-MANY // (32000 // (8 * 16)))
    assert counts[:2] == [[*fill, False]] * 2  # no table is kept before the first step
    assert counts[2:] == [[False], [*fill, False], [False]]
    for a, b in zip(contents(mine), contents(other), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("where", ["vgpu"])
@pytest.mark.parametrize("name", ["SGD", "Lamb"])
def test_the_counts_of_empty_and_skipped_tensors(name, where):
    """Every count is raised once in a step, that of a tensor without elements too, and none in a skipped one."""
    params = [torch.ones(n).requires_grad_() for n in (0, 3000, 0, 5)]
    optimizer = getattr(tw.optim, name)(params, lr=0.1, backend="vgpu")
    for step in range(4):
        set_gradients(params, step)
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.grad_scale = torch.tensor(1.0)
        optimizer.step()
    assert optimizer._plan is not None
    assert [optimizer.state[p]["step"].item() for p in params] == [3.0] * 4


@pytest.fixture
def capturing(monkeypatch):
    """Code that asks whether a CUDA graph is captured is told so."""
    for module in (base, hyper):
        monkeypatch.setattr(module, "is_capturing", lambda: True)


@pytest.mark.parametrize("where", ["vgpu"])
def test_a_captured_step_brings_its_own_table(where, monkeypatch, launches):
    """The graph runs when the addresses of the kept table are others; and what it reads, nobody frees or writes."""
    params = leaves(3)
    optimizer = tw.optim.AdamW(params, lr=0.1, backend="vgpu")
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    plan, table = optimizer._plan, optimizer._hyper(torch.device("cpu"))
    launches.clear()
    with monkeypatch.context() as patch:
        for module in (base, hyper):
            patch.setattr(module, "is_capturing", lambda: True)
        optimizer.step()
        assert ["rows" in name for name in launches] == [True, False]
        assert optimizer._plan is plan and not plan.moved
        optimizer.param_groups[0]["lr"] = 0.2  # written by kernels
        made = optimizer._hyper(torch.device("cpu"))
        assert same_bits(made, optimizer._hyper(torch.device("cpu")))
    assert any(kept is table for kept in optimizer._hyper_table._captured)
    optimizer.step()
    assert optimizer._hyper(torch.device("cpu")) is not made
    assert same_bits(optimizer._hyper(torch.device("cpu")), made)


def test_a_first_step_is_not_captured(capturing):
    p = torch.ones(3).requires_grad_()
    p.grad = torch.ones(3)
    optimizer = tw.optim.AdamW([p], lr=0.1)
    with pytest.raises(RuntimeError, match=r"AdamW: step: .*graph.* run a step before"):
        optimizer.step()


def test_a_learning_rate_on_the_device_is_read_in_every_step():
    """Numbers around it are kept; the meta device stands for one whose values nobody can look at."""
    table = hyper.HyperTable()
    lr = torch.tensor(0.5, device="meta")
    first = table.on(torch.device("meta"), [(lr, (0.9, 0.99)), (0.25, (0.9, 0.99))])
    kept = table._table
    second = table.on(torch.device("meta"), [(lr, (0.9, 0.99)), (0.25, (0.9, 0.99))])
    assert first.shape == second.shape == (2, 3) and first is not second
    assert table._table is kept
    lr = torch.tensor(0.5)
    rows = [(lr, (0.9, torch.tensor(0.99)))]
    assert table.on(torch.device("cpu"), rows).tolist() == [[0.5, 0.9, pytest.approx(0.99)]]
    lr.fill_(0.125)
    assert table.on(torch.device("cpu"), rows).tolist() == [[0.125, 0.9, pytest.approx(0.99)]]
