"""tw.optim.AdamW and tw.adamw_: against fp64, against torch, every layout and dtype pair, and what users reported."""

import copy
import io
import itertools
import pickle

import pytest
import torch
import trainwright as tw
from numerics import assert_within_rule, backends_for_tests, check_opcheck, same_bits
from torch.testing._internal.common_optimizers import (
    optim_error_inputs_func_adamw,
    optim_inputs_func_adamw,
)

from optim.cases import DTYPES, SIZES, Oracle, layouts

BACKENDS = backends_for_tests(tw.adamw_)
PAIRS = list(itertools.product(DTYPES, DTYPES))


def leaf(x):
    return x.detach().requires_grad_()


def set_grad(p, g):
    p.grad_dtype = None  # any gradient dtype
    p.grad = g


def train(optimizer, params, steps, seed=1, dtype=None, scale=1.0):
    """Steps with random gradients that depend on the step number alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * seed + step)
        for p in params:
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
            set_grad(p, g.to(dtype or p.dtype))
        optimizer.step()


def bits_of(optimizer):
    return [
        (k, v.clone()) for st in optimizer.state.values() for k, v in st.items() if isinstance(v, torch.Tensor)
    ]  # fmt: skip


def assert_same_state(a, b):
    a, b = bits_of(a), bits_of(b)
    assert [k for k, _ in a] == [k for k, _ in b]
    assert all(same_bits(x, y) for (_, x), (_, y) in zip(a, b))


# ---- the maths


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, {"betas": (0.0, 0.5), "eps": 1e-3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS, ids=lambda d: str(d)[6:])
def test_matches_fp64(dtype, grad_dtype, options, backend):
    """The exact value (master, or the parameter itself) is as near to fp64 as torch's AdamW in that dtype."""
    if backend != "cpu" and dtype is not grad_dtype and "eps" in options:
        return  # the compiled kernel covers the full product; the others a part of it
    options = {"lr": 1e-2, **options}
    shapes = [(n,) for n in SIZES] if backend != "triton" else [(9,), (257,), (0,)]
    start = [torch.randn(s).to(dtype) for s in shapes]
    params = [leaf(x.clone()) for x in start]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain_params = [leaf(x.to(wide)) for x in start]
    ours = tw.optim.AdamW(params, backend=backend, **options)
    plain = torch.optim.AdamW(plain_params, foreach=False, **options)
    exact = [Oracle(x, **options) for x in start]
    for _ in range(3):
        for p, q, e in zip(params, plain_params, exact):
            g = torch.randn(p.shape).to(grad_dtype)
            set_grad(p, g)
            q.grad = g.to(wide)
            e.step(g)
        ours.step()
        plain.step()
    for p, q, e in zip(params, plain_params, exact):
        state = ours.state[p]
        assert_within_rule("parameter", state.get("master", p).detach(), q.detach(), e.p)
        assert_within_rule("exp_avg", state["exp_avg"], plain.state[q]["exp_avg"], e.m)
        assert_within_rule("exp_avg_sq", state["exp_avg_sq"], plain.state[q]["exp_avg_sq"], e.v)
        assert state["step"].item() == 3 and p.grad.dtype == grad_dtype
        if "master" in state:
            assert same_bits(p.detach(), state["master"].to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", layouts())
def test_every_layout_gives_the_bits_of_contiguous(name, dtype, backend):
    """Matched by logical index, and nothing outside the view is touched (torch's fused CPU step gets both wrong)."""
    p, g = layouts(dtype)[name]
    base = p._base if p._base is not None else p
    untouched = torch.ones_like(base, dtype=torch.bool)
    untouched.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
    before = base.clone()
    dense = leaf(p.clone(memory_format=torch.contiguous_format))
    p = leaf(p)
    dense.grad, p.grad = g.clone(memory_format=torch.contiguous_format), g
    for x in (dense, p):
        optimizer = tw.optim.AdamW([x], lr=0.1, amsgrad=True, backend=backend)
        optimizer.step()
        optimizer.step()
    assert same_bits(p.detach(), dense.detach())
    assert torch.equal(base.detach()[untouched], before[untouched])


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("n", SIZES)
def test_an_element_has_the_same_bits_wherever_it_lies(n, offset):
    """Vector body and tail, aligned and not."""
    whole, g = torch.randn(n + 8), torch.randn(n + 8)
    single = leaf(whole.clone())
    single.grad = g
    tw.optim.AdamW([single], lr=0.1).step()
    part = leaf(whole[offset : offset + n])
    part.grad = g[offset : offset + n]
    tw.optim.AdamW([part], lr=0.1).step()
    assert same_bits(part.detach(), single.detach()[offset : offset + n])


def test_same_bits_for_any_thread_count_and_repeat():
    def result(threads):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        params = [leaf(torch.randn(n)) for n in (70001, 3, 1024, 0, 40000)] + [
            leaf(torch.randn(200, 99).t())
        ]
        optimizer = tw.optim.AdamW(params, lr=0.1, max_grad_norm=0.5)
        train(optimizer, params, range(3))
        return [p.detach() for p in params] + [optimizer.last_step.grad_norm]

    try:
        results = [result(t) for t in (1, 2, 3, 2)]
    finally:
        torch.set_num_threads(2)
    assert all(same_bits(a, b) for r in results for a, b in zip(r, results[0]))


# ---- torch's own inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "triton"])
def test_torch_s_own_optimizer_inputs(dtype, backend):
    tensors = [{"lr": torch.tensor(1e-3)},
               {"lr": torch.tensor(1e-2), "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]])), "amsgrad": True},
               {"capturable": True}, {"fused": True}, {"foreach": True}]  # fmt: skip
    configs = [c.kwargs for c in optim_inputs_func_adamw("cpu", dtype)] + tensors
    assert len(configs) >= 10
    for kwargs in configs:
        torch.manual_seed(0)
        a = [
            leaf(torch.randn(16, 8).to(dtype)),
            leaf(torch.randn(8).to(dtype)),
            leaf(torch.randn(()).to(dtype)),
        ]
        b = [leaf(p.detach().clone()) for p in a]
        for_loop = {k: v for k, v in kwargs.items() if k not in ("capturable", "fused", "foreach")}
        for_loop = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in for_loop.items()}
        if "betas" in for_loop:
            for_loop["betas"] = tuple(float(x) for x in for_loop["betas"])
        groups = [
            [{"params": x[:1]}, {"params": x[1:], "lr": 0.05, "weight_decay": 0.3}] for x in (a, b)
        ]
        ours = tw.optim.AdamW(groups[0], backend=backend, **kwargs)
        theirs = torch.optim.AdamW(groups[1], foreach=False, **for_loop)
        for i in range(7):
            for p, q in zip(a, b):
                # one transposed gradient; the last parameter is without gradient in steps 3 and 4
                p.grad = (
                    torch.randn(*reversed(p.shape), dtype=dtype).t()
                    if p.dim() == 2
                    else torch.randn_like(p)
                )
                q.grad = p.grad.clone(memory_format=torch.contiguous_format)
                if p.dim() == 0 and i in (3, 4):
                    p.grad = q.grad = None
            ours.step()
            theirs.step()
            for p, q in zip(a, b):
                torch.testing.assert_close(p, q)
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(ours.state[p][key], theirs.state[q][key])
                assert ours.state[p]["step"] == theirs.state[q]["step"]


@pytest.mark.filterwarnings("ignore")
def test_torch_s_own_error_inputs():
    inputs = optim_error_inputs_func_adamw("cpu", torch.float32)
    assert len(inputs) >= 8
    for error in inputs:
        spec = error.optimizer_error_input
        params = spec.params if spec.params is not None else [leaf(torch.ones(2))]
        # torch only warns about a parameter that is listed twice; here it is an error
        kind = ValueError if error.error_type is UserWarning else error.error_type
        with pytest.raises(kind) as caught:
            tw.optim.AdamW(params, **spec.kwargs)
        if error.error_type is not UserWarning:
            caught.match(error.error_regex)


# ---- state


def both_ways(dtype=torch.float32):
    params = [leaf(torch.randn(5, 7).to(dtype)), leaf(torch.randn(33).to(dtype))]
    return params, [leaf(p.detach().clone()) for p in params]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("direction", ["torch to ours", "ours to torch"])
def test_a_checkpoint_loads_in_both_directions_mid_run(direction, amsgrad):
    a, b = both_ways()
    options = {"lr": 1e-2, "amsgrad": amsgrad, "weight_decay": 0.1}
    makers = [lambda p: torch.optim.AdamW(p, **options), lambda p: tw.optim.AdamW(p, **options)]
    if direction == "ours to torch":
        makers.reverse()
    first = makers[0](a)
    train(first, a, range(4))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = makers[1](b)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(a, b):
        q.data.copy_(p.data)
    train(first, a, range(4, 9))
    train(second, b, range(4, 9))
    for p, q in zip(a, b):
        torch.testing.assert_close(p, q)
        assert second.state[q]["step"].item() == 9
    assert (
        first.state_dict()["param_groups"][0].keys()
        == second.state_dict()["param_groups"][0].keys()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resume_is_bit_equal(dtype):
    a, b = both_ways(dtype)
    first = tw.optim.AdamW(a, lr=1e-2)
    train(first, a, range(3), dtype=torch.float32)
    second = tw.optim.AdamW(b, lr=1e-2)
    buffer = io.BytesIO()
    torch.save({"model": [p.detach() for p in a], "optimizer": first.state_dict()}, buffer)
    buffer.seek(0)
    checkpoint = torch.load(buffer, weights_only=True)
    for q, saved in zip(b, checkpoint["model"]):
        q.data.copy_(saved)
    second.load_state_dict(checkpoint["optimizer"])
    assert_same_state(first, second)
    for optimizer, params in ((first, a), (second, b)):
        train(optimizer, params, range(3, 6), dtype=torch.float32)
    assert_same_state(first, second)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))


def test_state_keeps_its_dtype_for_bf16_parameters():
    """pytorch#43706: torch casts the loaded state to the parameter's dtype."""
    a, b = both_ways(torch.bfloat16)
    first = tw.optim.AdamW(a)
    train(first, a, range(2))
    state = {k: v.dtype for k, v in bits_of(first)}
    assert state == {"step": torch.float64, "exp_avg": torch.float32, "exp_avg_sq": torch.float32,
                     "master": torch.float32}  # fmt: skip
    second = tw.optim.AdamW(b)
    second.load_state_dict(first.state_dict())
    assert_same_state(first, second)
    # what was loaded is a copy: going on with one does not change the other
    train(first, a, range(2, 3))
    assert not same_bits(first.state[a[0]]["exp_avg"], second.state[b[0]]["exp_avg"])


def test_a_contiguous_checkpoint_resumes_into_a_channels_last_model():
    x = torch.randn(4, 3, 5, 5)
    a, b = leaf(x.clone()), leaf(x.clone().to(memory_format=torch.channels_last))
    first, second = tw.optim.AdamW([a], lr=0.1), tw.optim.AdamW([b], lr=0.1)
    train(first, [a], range(2))
    second.load_state_dict(first.state_dict())
    b.data.copy_(a.data)
    for optimizer, p in ((first, a), (second, b)):
        train(optimizer, [p], range(2, 4))
    assert same_bits(a.detach(), b.detach())


def test_flags_and_options_come_from_the_constructor_not_from_a_checkpoint():
    a, b = both_ways(torch.bfloat16)
    first = torch.optim.AdamW(a, foreach=True, capturable=False, lr=0.5)
    train(first, a, range(1))
    second = tw.optim.AdamW(
        b, fused=True, backend="torch", max_grad_norm=2.0, master_weights="none"
    )
    second.load_state_dict(first.state_dict())
    group = second.param_groups[0]
    assert group["fused"] is True and group["foreach"] is None and group["lr"] == 0.5
    third = tw.optim.AdamW(a)
    train(third, a, range(1))
    second.load_state_dict(third.state_dict())
    assert "master" not in second.state[b[0]]  # master_weights="none" was asked for
    train(second, b, range(1))
    assert second.last_step.grad_norm is not None and second._options.backend == "torch"


def test_older_state_dict_with_number_steps_and_missing_options():
    (p, _), _ = both_ways()
    optimizer = tw.optim.AdamW([p], maximize=True)
    train(optimizer, [p], range(2))
    old = copy.deepcopy(optimizer.state_dict())
    old["state"][0]["step"] = 20_000_001
    for key in (
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    ):
        old["param_groups"][0].pop(key, None)
    optimizer.load_state_dict(old)
    train(optimizer, [p], range(1))
    assert optimizer.state[p]["step"].item() == 20_000_002 and optimizer.param_groups[0]["maximize"]


def test_step_count_stays_exact_beyond_2_to_the_24():
    """pytorch#173901: an fp32 count stops at 16777216."""
    p = leaf(torch.ones(3))
    optimizer = tw.optim.AdamW([p], betas=(0.9, 0.99999999))
    train(optimizer, [p], range(1))
    optimizer.state[p]["step"].fill_(2**24)
    train(optimizer, [p], range(3))
    assert optimizer.state[p]["step"].item() == 2**24 + 3
    second = tw.optim.AdamW([p], fused=True)
    second.load_state_dict(optimizer.state_dict())
    second.load_state_dict(second.state_dict())
    assert second.state[p]["step"].item() == 2**24 + 3


def moved_state(o, p):
    o.state[p]["exp_avg"] = o.state[p]["exp_avg"].clone()


def moved_state_data(o, p):
    o.state[p]["exp_avg_sq"].data = o.state[p]["exp_avg_sq"].data.clone()


def moved_parameter(o, p):
    p.data = p.data.clone()


def strided_parameter(o, p):
    p.data = p.data.t().contiguous().t()


def strided_gradient(o, p):
    p.grad = p.grad.t().contiguous().t()


def fp64_gradient(o, p):
    set_grad(p, p.grad.double())


def no_gradient(o, p):
    p.grad = None


def fresh_state(o, p):
    o.state[p] = copy.deepcopy(o.state[p])


def reloaded(o, p):
    o.load_state_dict(copy.deepcopy(o.state_dict()))


def amsgrad_on(o, p):
    o.param_groups[0]["amsgrad"] = True


def another_group(o, p):
    o.add_param_group({"params": [leaf(torch.ones(3))]})


def another_learning_rate(o, p):
    o.param_groups[0]["lr"] = 0.5


def forgotten_state(o, p):
    del o.state[p]


@pytest.mark.parametrize(
    "change",
    [moved_state, moved_state_data, moved_parameter, strided_parameter, strided_gradient, fp64_gradient, no_gradient,
     fresh_state, reloaded, amsgrad_on, another_group, another_learning_rate, forgotten_state],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_remembered_from_the_last_step_goes_stale(dtype, change):
    """The optimizer keeps a table of addresses between steps; it must notice whatever the user does in between."""
    runs = []
    for backend in ("cpu", "torch"):  # the torch reference remembers nothing
        torch.manual_seed(0)
        p, q = leaf(torch.randn(6, 5).to(dtype)), leaf(torch.randn(40))
        optimizer = tw.optim.AdamW([p, q], lr=0.1, backend=backend)
        train(optimizer, [p, q], range(3))
        assert (optimizer._plan is not None) == (backend == "cpu")
        for x in (p, q):
            set_grad(x, torch.ones_like(x))
        change(optimizer, p)
        optimizer.step()
        train(optimizer, [p, q], range(3, 5))
        runs.append([p.detach(), q.detach(), *(v for _, v in bits_of(optimizer))])
    assert len(runs[0]) == len(runs[1])
    for a, b in zip(*runs):
        torch.testing.assert_close(
            a, b, atol=1e-6, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5
        )


def test_wrong_state_shape_is_an_error_and_changes_nothing():
    a, b = leaf(torch.ones(3)), leaf(torch.ones(4))
    first, second = tw.optim.AdamW([a]), tw.optim.AdamW([b])
    for optimizer, p in ((first, a), (second, b)):
        train(optimizer, [p], range(1))
    before = bits_of(second)
    with pytest.raises(
        ValueError, match=r"load_state_dict: exp_avg: expected shape \(4,\), got \(3,\)"
    ):
        second.load_state_dict(first.state_dict())
    assert all(same_bits(x, y) for (_, x), (_, y) in zip(before, bits_of(second)))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_on_alike(how):
    p = leaf(torch.randn(40).bfloat16())
    optimizer = tw.optim.AdamW([p], lr=0.1, max_grad_norm=0.5, backend="cpu")
    train(optimizer, [p], range(2))
    other = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    q = other.param_groups[0]["params"][0]
    assert q is not p
    for o, x in ((optimizer, p), (other, q)):
        train(o, [x], range(2, 4))
    assert same_bits(p.detach(), q.detach()) and other._options == optimizer._options
    assert_same_state(optimizer, other)


# ---- groups, missing gradients, schedulers, hooks


def test_every_parameter_has_its_own_step_count():
    """DeepSpeed #8471, torch fused SGD: a first gradient that comes late, and gaps."""
    params = [leaf(torch.randn(9)) for _ in range(3)]
    optimizer = tw.optim.AdamW(params, lr=0.1)
    exact = [Oracle(p, lr=0.1) for p in params]
    for step in range(6):
        for i, (p, e) in enumerate(zip(params, exact)):
            p.grad = None
            if step % (i + 1) == i:
                p.grad = torch.randn(9)
                e.step(p.grad)
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [6, 3, 2]
    for p, e in zip(params, exact):
        torch.testing.assert_close(p.detach().double(), e.p, atol=1e-6, rtol=1e-6)


def test_a_parameter_without_gradient_gets_no_state_and_no_decay():
    p, q = leaf(torch.ones(3)), leaf(torch.ones(3))
    optimizer = tw.optim.AdamW([p, q], weight_decay=0.5)
    train(optimizer, [p], range(2))
    assert q.tolist() == [1, 1, 1] and q not in optimizer.state
    tw.optim.AdamW([q]).step()  # no gradient at all


def test_zero_size_parameters_anywhere_do_not_stop_the_others():
    """TransformerEngine #3207: an empty tensor last in the list, and updates silently not launched."""
    params = [leaf(torch.ones(n)) for n in (0, 5, 0, 0, 7, 0)]
    train(tw.optim.AdamW(params, lr=0.1), params, range(1))
    assert all((p != 1).all() for p in params)


def test_amsgrad_switched_on_mid_run_starts_its_state_then():
    p = leaf(torch.randn(20))
    optimizer = tw.optim.AdamW([p], lr=0.1)
    exact = Oracle(p, lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["amsgrad"] = exact.amsgrad = True
            exact.vmax.zero_()
        p.grad = torch.randn(20) / (1 + 10 * step)
        exact.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), exact.p, atol=1e-6, rtol=1e-5)


def test_groups_with_their_own_options_and_a_group_added_later():
    p, q = leaf(torch.randn(5)), leaf(torch.randn(6))
    optimizer = tw.optim.AdamW(
        [{"params": [p], "lr": 0.1, "betas": (0.5, 0.9), "maximize": True}], lr=0.3
    )
    e = Oracle(p, lr=0.1, betas=(0.5, 0.9), maximize=True)
    f = Oracle(q, lr=0.3, eps=0.1, amsgrad=True)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": q, "eps": 0.1, "amsgrad": True})
        for x, oracle in ((p, e), (q, f)):
            x.grad = torch.randn_like(x)
            if x is p or step >= 2:
                oracle.step(x.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), e.p, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(q.detach().double(), f.p, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_scheduler_moves_the_learning_rate(tensor_lr):
    p = leaf(torch.zeros(1))
    optimizer = tw.optim.AdamW([p], lr=torch.tensor(1.0) if tensor_lr else 1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
    moved = []
    for _ in range(3):
        before = p.item()
        p.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        moved.append(before - p.item())
    assert moved == pytest.approx([1.0, 0.5, 0.25], rel=1e-5)


def test_closure_and_hooks():
    p = leaf(torch.ones(2))
    optimizer = tw.optim.AdamW([p], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0 and calls == ["pre", "post"] and (p < 1).all()


def test_state_dict_hooks_see_what_torch_s_would():
    p = leaf(torch.ones(2).bfloat16())
    optimizer = tw.optim.AdamW([p])
    train(optimizer, [p], range(1))
    saved, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(
        lambda o, sd: seen.append(type(sd["state"][0]["exp_avg"]))
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[p]["exp_avg"].dtype))
    optimizer.load_state_dict(saved)
    assert seen == [torch.Tensor, torch.float32]


# ---- low precision


def test_bf16_parameters_do_not_stall():
    """pytorch#120376: without a master p stays 1.0 at lr 1e-3, and weight decay alone never acts."""
    p = leaf(torch.ones(8, dtype=torch.bfloat16))
    q = leaf(torch.ones(8))
    for x in (p, q):
        optimizer = tw.optim.AdamW([x], lr=1e-3, weight_decay=0.1)
        for _ in range(100):
            x.grad = torch.ones_like(x)
            optimizer.step()
    assert same_bits(p.detach(), q.detach().bfloat16()) and p[0].item() < 0.95
    r = leaf(torch.ones(8, dtype=torch.bfloat16))
    optimizer = tw.optim.AdamW([r], lr=1e-3, master_weights="none")
    for _ in range(100):
        r.grad = torch.ones_like(r)
        optimizer.step()
    assert "master" not in optimizer.state[r] and r[0].item() == 1.0


def test_masters_are_refreshed_after_an_edit_by_hand():
    p = leaf(torch.ones(4, dtype=torch.bfloat16))
    optimizer = tw.optim.AdamW([p], lr=0.1, weight_decay=0.0)
    train(optimizer, [p], range(1))
    with torch.no_grad():
        p.fill_(5.0)
    optimizer.refresh_masters()
    train(optimizer, [p], range(1, 2))
    assert (p > 4).all()


def test_mixed_dtypes_in_one_group_and_gradients_of_another_dtype():
    params = [leaf(torch.randn(40).to(d)) for d in DTYPES]
    optimizer = tw.optim.AdamW(params, lr=0.1)
    exact = [Oracle(p, lr=0.1) for p in params]
    for _ in range(2):
        for p, e, d in zip(params, exact, reversed(DTYPES)):
            g = torch.randn(40).to(d)
            set_grad(p, g)
            e.step(g)
        optimizer.step()
    for p, e in zip(params, exact):
        value = optimizer.state[p].get("master", p).detach().double()
        torch.testing.assert_close(value, e.p, atol=1e-6, rtol=1e-6)


# ---- clipping and loss scaling


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_clipping_inside_the_step_equals_clipping_before_it(dtype, backend):
    a, b = both_ways(dtype)
    ours = tw.optim.AdamW(a, lr=0.1, max_grad_norm=0.75, backend=backend)
    plain = tw.optim.AdamW(b, lr=0.1, backend=backend)
    for scale in (10.0, 0.001):
        grads = [torch.randn(p.shape) * scale for p in a]
        total = torch.sqrt(sum(g.to(dtype).double().square().sum() for g in grads))
        coefficient = min(1.0, 0.75 / (total.item() + 1e-6))
        for p, q, g in zip(a, b, grads):
            p.grad = g.to(dtype)
            set_grad(q, g.to(dtype).double() * coefficient)
        kept = [p.grad.clone() for p in a]
        ours.step()
        plain.step()
        assert all(same_bits(p.grad, k) for p, k in zip(a, kept))
        assert ours.last_step.grad_norm.item() == pytest.approx(total.item(), rel=1e-6)
        assert ours.last_step.grad_norm.dtype == torch.float32 and not ours.last_step.skipped
    for p, q in zip(a, b):
        x, y = (o.state[t].get("master", t).detach() for o, t in ((ours, p), (plain, q)))
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_no_norm_is_computed_when_nothing_needs_it():
    p = leaf(torch.ones(2))
    optimizer = tw.optim.AdamW([p])
    train(optimizer, [p], range(1))
    assert optimizer.last_step.grad_norm is None and optimizer.last_step.skipped.item() is False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("found", [1.0, 2.0, 0.5, float("nan")])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_changes_no_bit(dtype, first, found, backend):
    """Any non-zero found_inf counts; parameters, state, masters and step counts stay; the run goes on unharmed."""
    a, b = both_ways(dtype)
    ours, never = (tw.optim.AdamW(x, lr=0.1, amsgrad=True, backend=backend) for x in (a, b))
    if not first:
        train(ours, a, range(1))
        train(never, b, range(1))
    params = [p.detach().clone() for p in a]
    state = bits_of(ours)
    ours.found_inf = torch.tensor(found)
    ours.grad_scale = torch.tensor(4.0)
    train(ours, a, range(50, 52), scale=float("inf"))
    assert ours.last_step.skipped.item() is True
    del ours.found_inf, ours.grad_scale
    assert all(same_bits(p.detach(), q) for p, q in zip(a, params))
    if not first:
        assert all(same_bits(x, y) for (_, x), (_, y) in zip(state, bits_of(ours)))
    train(ours, a, range(1, 3))
    train(never, b, range(1, 3))
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b))
    assert_same_state(ours, never)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_works_with_torch_s_grad_scaler(unscale_first):
    a, b = both_ways()
    ours, theirs = tw.optim.AdamW(a, lr=0.1), torch.optim.AdamW(b, lr=0.1, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for optimizer, params, scaler in ((ours, a, scalers[0]), (theirs, b, scalers[1])):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = sum((p * torch.randn_like(p)).sum() for p in params)
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert ours.last_step.skipped.item() == (step == 3)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for p, q in zip(a, b):
            torch.testing.assert_close(p, q)
            assert ours.state[p]["step"].item() == theirs.state[q]["step"].item()


def test_nan_without_a_scaler_reaches_the_parameter():
    p = leaf(torch.ones(3))
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    tw.optim.AdamW([p]).step()
    assert p.isnan().tolist() == [False, True, False]


# ---- errors and the rest of the contract


def test_updates_bump_the_version_counter():
    p = leaf(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    out = (p * x).sum()  # saves p for the gradient of x
    p.grad = torch.ones(3)
    tw.optim.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"master_weights": "bf16"}, ValueError, "master_weights: expected 'auto', 'fp32', 'split16' or 'none'"),
        ({"state_dtype": torch.float16}, ValueError, "state_dtype: expected"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding: expected a bool"),
        ({"seed": 1.5}, TypeError, "seed: expected an int"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm: expected at least 0.0"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of"),
        ({"differentiable": True}, ValueError, "differentiable: expected False"),
    ],
)  # fmt: skip
def test_bad_options(kwargs, error, text):
    with pytest.raises(error, match=text):
        tw.optim.AdamW([leaf(torch.ones(2))], **kwargs)


def test_bad_parameters_and_gradients():
    p = leaf(torch.ones(2))
    with pytest.raises(ValueError, match="listed twice"):
        tw.optim.AdamW([p, p])
    with pytest.raises(TypeError, match=r"params\[0\]: expected a dense .*complex64"):
        tw.optim.AdamW([torch.ones(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(TypeError, match="an expanded tensor"):
        tw.optim.AdamW([torch.ones(1).expand(4).detach().requires_grad_()])
    optimizer = tw.optim.AdamW([p])
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    with pytest.raises(tw.BackendError):
        p.grad = torch.ones(2)
        tw.optim.AdamW([p], backend="cuda").step()


def test_functional_form_checks_its_arguments():
    def call(**changes):
        one = lambda: [torch.zeros(3)]  # noqa: E731
        arguments = {"params": one(), "grads": one(), "exp_avgs": one(), "exp_avg_sqs": one(),
                     "steps": [torch.zeros((), dtype=torch.float64)], "lr": 0.1, **changes}  # fmt: skip
        tw.adamw_(**arguments)

    call()
    for changes, error, text in [
        ({"grads": []}, ValueError, "grads: expected 1 tensors, got 0"),
        ({"grads": [torch.zeros(4)]}, ValueError, r"grads\[0\]: expected shape \(3\)"),
        (
            {"exp_avgs": [torch.zeros(3).half()]},
            TypeError,
            r"exp_avgs\[0\]: expected dtype float32",
        ),
        ({"steps": [torch.zeros(())]}, TypeError, r"steps\[0\]: expected dtype float64"),
        ({"masters": [torch.zeros(3)]}, ValueError, r"masters\[0\]: expected None"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]: expected a number below 1"),
        ({"lr": "1"}, TypeError, "lr: expected a number"),
    ]:
        with pytest.raises(error, match=text):
            call(**changes)


def test_functional_form_compiles_without_graph_break():
    def step(p, g, m, v, t):
        tw.adamw_([p], [g], [m], [v], [t], lr=0.1)
        return p * 2

    def make():
        torch.manual_seed(0)
        return [
            torch.randn(5),
            torch.randn(5),
            torch.zeros(5),
            torch.zeros(5),
            torch.zeros((), dtype=torch.float64),
        ]

    a, b = make(), make()
    expected = step(*a)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*b)
    assert same_bits(got, expected) and all(same_bits(x, y) for x, y in zip(a, b))


def test_opcheck():
    hyper = torch.tensor([[0.1, 0.9, 0.999, 1e-8, 0.01, 0.0]], dtype=torch.float64)
    p, g = torch.randn(4, 3).t(), torch.randn(3, 4)
    check_opcheck(
        torch.ops.trainwright.adamw_.default, [p], [g], [], [torch.zeros(3, 4) for _ in range(3)],
        [torch.zeros((), dtype=torch.float64)], [1 << 5], [0], hyper, None, 0, None,
    )  # fmt: skip
