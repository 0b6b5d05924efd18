"""tw.optim.Offload: the bits of the optimizer on the CPU, whatever the copy engine does within its rights."""

import copy
import io
import itertools
import pickle
import types

import pytest
import torch
import trainwright as tw
from numerics import same_bits
from trainwright.optim import _copy_engine

from optim.copy_engines import Scrambled

CLASSES = {
    name: getattr(tw.optim, name)
    for name in ("AdamW", "Adam", "SGD", "RMSprop", "Lion", "Lamb")
    if hasattr(tw.optim, name)
}
SHAPES = [(300,), (7, 33), (), (0, 4), (1000,), (5,), (64, 17)]
SMALL = 1000 / 2**20  # chunk_mb: several chunks for SHAPES
ENGINES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(4))]


def leaf(x):
    return x.detach().requires_grad_()


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [leaf(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    params.append(leaf(torch.randn(9, 32, generator=generator).to(dtype)[:, ::2]))
    params.append(leaf(torch.randn(16, 9, generator=generator).to(dtype).t()))
    return params


def gradients(params, step, dtype=None, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator) * scale
        p.grad_dtype = None
        p.grad = g.to(dtype or p.dtype)
        if i % 3 == 1 and p.dim() == 2:
            p.grad = p.grad.t().contiguous().t()


def assert_same_run(a, first, b, second):
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a, b, strict=True))
    for p, q in zip(a, b):
        assert first.state[p].keys() == second.state[q].keys()
        for key, value in first.state[p].items():
            other = second.state[q][key]
            assert same_bits(value, other) if isinstance(value, torch.Tensor) else value == other


def pair(name="AdamW", dtype=torch.float32, engine=None, **options):
    """The same run twice: (parameters, plain optimizer, parameters, offloaded optimizer)."""
    options = {"lr": 0.05, **options}
    a, b = parameters(dtype), parameters(dtype)
    plain = CLASSES[name](a, **options)
    offloaded = tw.optim.Offload(
        CLASSES[name](b, **options), chunk_mb=SMALL, engine=engine or Scrambled()
    )
    return a, plain, b, offloaded


# ---- the same bits


@pytest.mark.parametrize(("when", "seed"), ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", CLASSES)
def test_has_the_bits_of_the_optimizer_itself(name, dtype, when, seed):
    a, plain, b, offloaded = pair(
        name, dtype, Scrambled(when, seed), weight_decay=0.1, max_grad_norm=2.0
    )
    for step in range(4):
        grad_dtype = torch.float32 if step % 2 else dtype
        for params in (a, b):
            gradients(params, step, grad_dtype)
        kept = [p.grad.clone() for p in b]
        plain.step()
        offloaded.step()
        assert all(same_bits(p.grad, k) for p, k in zip(b, kept))
        assert same_bits(plain.last_step.grad_norm, offloaded.last_step.grad_norm)
    assert_same_run(a, plain, b, offloaded)


def test_chunks_use_two_buffers_and_overlap():
    """The order of the calls: the next chunk is on its way while the host steps, and nobody waits for a copy up. The
    multiplier crosses the link behind the first chunk alone."""
    _, _, b, offloaded = pair()
    gradients(b, 0)
    offloaded.step()
    gradients(b, 1)
    engine, multiplier = offloaded._engine, offloaded._multiplier
    offloaded._multiplier = lambda params: engine.calls.append("multiplier") or multiplier(params)
    engine.calls.clear()
    offloaded.step()
    chunks = engine.calls.count("down")
    assert chunks >= 4
    expected = ["wait up", "begin", "down", "multiplier", "down"]
    for i in range(chunks):
        expected += ["wait down", *(["down"] if i + 2 < chunks else []), "up"]
    assert engine.calls == [*expected, "finish"]
    largest = max(p.numel() * 4 for p in b)
    assert all(buffer.numel() <= max(1000, largest) + 64 for buffer in offloaded._buffers)


@pytest.mark.parametrize("missing", ["wait down", "wait up", "finish"])
def test_a_missing_wait_shows(missing):
    """The engine of these tests is able to find what it is there for."""
    a, plain, b, offloaded = pair()
    engine = offloaded._engine
    if missing == "finish":
        engine.finish = lambda: None
    else:
        real = engine.synchronize
        engine.synchronize = lambda t: None if f"wait {t[0]}" == missing else real(t)

    def run():
        for step in range(2):
            for optimizer, params in ((plain, a), (offloaded, b)):
                gradients(params, step)
                optimizer.step()
        assert_same_run(a, plain, b, offloaded)

    with pytest.raises(AssertionError):
        run()


def test_lost_updates_are_counted_over_all_chunks_and_shards_keep_their_place():
    options = {
        "master_weights": "none",
        "state_dtype": "int8",
        "stochastic_rounding": True,
        "count_lost_updates": True,
    }
    a, b = parameters(torch.bfloat16), parameters(torch.bfloat16)
    for params in (a, b):
        params[4].shard_offset = 512
    plain = CLASSES["AdamW"](a, lr=1e-4, **options)
    inner = CLASSES["AdamW"](b, lr=1e-4, **options)
    offloaded = tw.optim.Offload(inner, chunk_mb=SMALL, engine=Scrambled())
    for step in range(2):
        for optimizer, params in ((plain, a), (offloaded, b)):
            gradients(params, step)
            optimizer.step()
        fraction = plain.last_step.lost_update_fraction
        assert fraction > 0.1 and same_bits(fraction, offloaded.last_step.lost_update_fraction)
    assert_same_run(a, plain, b, offloaded)


def test_the_optimizer_s_state_moves_to_the_host():
    a, b = parameters(torch.bfloat16), parameters(torch.bfloat16)
    plain, other = tw.optim.AdamW(a, lr=0.1), tw.optim.AdamW(b, lr=0.1)
    for optimizer, params in ((plain, a), (other, b)):
        gradients(params, 0)
        optimizer.step()
    offloaded = tw.optim.Offload(other, engine=Scrambled())
    assert not other.state and offloaded.state[b[0]]["master"].dtype == torch.float32
    for optimizer, params in ((plain, a), (offloaded, b)):
        gradients(params, 1)
        optimizer.step()
    assert_same_run(a, plain, b, offloaded)


# ---- everything around the step


def test_gradient_accumulation():
    a, plain, b, offloaded = pair(max_grad_norm=1.0)
    for optimizer, params in ((plain, a), (offloaded, b)):
        for start in (0, 1):
            for micro in range(3):
                torch.manual_seed(10 * start + micro)
                sum((p * torch.randn(p.shape)).sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in params)
    assert_same_run(a, plain, b, offloaded)


def test_parameters_without_gradient_and_late_ones():
    a, plain, b, offloaded = pair()
    for step in range(4):
        for optimizer, params in ((plain, a), (offloaded, b)):
            gradients(params, step)
            for i, p in enumerate(params):
                if step < i % 3 or (step == 2 and i == 1):
                    p.grad = None
            optimizer.step()
    assert_same_run(a, plain, b, offloaded)
    for optimizer in (plain, offloaded):
        optimizer.zero_grad()
        optimizer.step()  # no gradient at all
        assert optimizer.last_step.skipped.item() is False
    assert_same_run(a, plain, b, offloaded)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_groups_schedulers_and_a_group_added_later(tensor_lr):
    runs = []
    for wrap in (False, True):
        params = parameters()
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = tw.optim.AdamW(
            [{"params": params[:3]}, {"params": params[3:7], "lr": 0.02, "betas": (0.5, 0.9)}],
            lr=lr,
        )
        if wrap:
            optimizer = tw.optim.Offload(optimizer, chunk_mb=SMALL, engine=Scrambled())
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
        for step in range(6):
            if step == 4:
                optimizer.add_param_group({"params": params[7:], "weight_decay": 0.5})
            gradients(params, step)
            optimizer.step()
            if step < 4:
                schedule.step()
        optimizer.param_groups[0]["amsgrad"] = True
        gradients(params, 6)
        optimizer.step()
        runs.append((params, optimizer))
    (a, plain), (b, offloaded) = runs
    assert [g["lr"] for g in plain.param_groups] == [g["lr"] for g in offloaded.param_groups]
    assert "max_exp_avg_sq" in offloaded.state[b[0]]
    assert_same_run(a, plain, b, offloaded)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("kind", ["GradScaler", "LossScaler"])
def test_scalers_and_skipped_steps(kind, unscale_first):
    a, plain, b, offloaded = pair(max_grad_norm=1.0)
    for optimizer, params in ((plain, a), (offloaded, b)):
        scaler = (
            tw.LossScaler(2.0**10)
            if kind == "LossScaler"
            else torch.amp.GradScaler("cpu", init_scale=2.0**10)
        )
        for step in range(5):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = sum((p * torch.randn(p.shape)).sum() for p in params)
            before = [p.detach().clone() for p in params]
            bad = step in (0, 3)
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.last_step.skipped.item() == bad
            if bad:
                assert all(same_bits(p.detach(), q) for p, q in zip(params, before))
        assert scaler.get_scale() == 2.0**8
        assert not hasattr(optimizer, "found_inf") or optimizer is not offloaded
    assert not hasattr(offloaded._device, "grad_scale")
    assert_same_run(a, plain, b, offloaded)


def test_closure_and_hooks():
    p = leaf(torch.ones(2))
    optimizer = tw.optim.Offload(tw.optim.AdamW([p], lr=0.1), engine=Scrambled())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, sd: {**sd, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: calls.append(sd["extra"]))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0 and (p < 1).all()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "saving", 1, "loaded"]


# ---- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["offload to plain", "plain to offload", "torch to offload"])
@pytest.mark.parametrize("model_first", [True, False])
def test_checkpoints_go_both_ways_mid_run(direction, dtype, model_first):
    a, b = parameters(dtype), parameters(dtype, seed=1)
    makers = {
        "plain": lambda p: tw.optim.AdamW(p, lr=0.1),
        "offload": lambda p: tw.optim.Offload(tw.optim.AdamW(p, lr=0.1), engine=Scrambled()),
        "torch": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    }
    source, target = (makers[k] for k in direction.split(" to "))
    first, second = source(a), target(b)
    for step in range(2):
        gradients(a, step)
        first.step()
    gradients(b, 9)
    second.step()  # the target has a past, which must not shine through
    buffer = io.BytesIO()
    torch.save({"model": [p.detach() for p in a], "optimizer": first.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    if not model_first:
        second.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for q, value in zip(b, saved["model"]):
            q.copy_(value)
    if model_first:
        second.load_state_dict(saved["optimizer"])
    for optimizer, params in ((first, a), (second, b)):
        gradients(params, 3, torch.float32 if direction[:5] != "torch" else None)
        optimizer.step()
    if direction != "torch to offload":
        assert_same_run(a, first, b, second)
    elif dtype is torch.float32:
        for p, q in zip(a, b):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_alike(how):
    a = parameters(torch.bfloat16)
    first = tw.optim.Offload(tw.optim.AdamW(a, lr=0.1, max_grad_norm=0.5), chunk_mb=SMALL)
    gradients(a, 0)
    first.step()
    second = copy.deepcopy(first) if how == "deepcopy" else pickle.loads(pickle.dumps(first))
    b = [p for group in second.param_groups for p in group["params"]]
    assert not {id(p) for p in a} & {id(q) for q in b} and second._chunk_mb == SMALL
    for optimizer, params in ((first, a), (second, b)):
        gradients(params, 1)
        optimizer.step()
    assert_same_run(a, first, b, second)


def in_place(p):
    with torch.no_grad():
        p.mul_(2.0)


def new_storage(p):
    p.data = p.data * 2.0


def hidden(p):
    p.data.mul_(2.0)


@pytest.mark.parametrize("edit", [in_place, new_storage, hidden])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_edited_between_steps(dtype, edit):
    a, plain, b, offloaded = pair(dtype=dtype, master_weights="none")
    for optimizer, params in ((plain, a), (offloaded, b)):
        gradients(params, 0)
        optimizer.step()
        edit(params[0])
        if edit is hidden and optimizer is offloaded:
            optimizer.refresh_masters()
        gradients(params, 1)
        optimizer.step()
    assert_same_run(a, plain, b, offloaded)


def test_masters_are_refreshed_after_an_edit():
    a, plain, b, offloaded = pair(dtype=torch.bfloat16)
    for optimizer, params in ((plain, a), (offloaded, b)):
        gradients(params, 0)
        optimizer.step()
        hidden(params[0])
        optimizer.refresh_masters()
        gradients(params, 1)
        optimizer.step()
    assert_same_run(a, plain, b, offloaded)


def test_unchanged_parameters_are_not_brought_down_again():
    _, _, b, offloaded = pair()
    counts = []
    for step in range(3):
        gradients(b, step)
        offloaded.step()
        counts.append(offloaded._engine.calls.count("begin"))
    assert counts == [2, 3, 4]  # the first step also fetches the parameters


def test_state_replaced_by_the_user_is_used():
    a, plain, b, offloaded = pair()
    for optimizer, params in ((plain, a), (offloaded, b)):
        gradients(params, 0)
        optimizer.step()
        del optimizer.state[params[0]]
        optimizer.state[params[1]] = copy.deepcopy(optimizer.state[params[1]])
        optimizer.state[params[1]]["exp_avg"].zero_()
        gradients(params, 1)
        optimizer.step()
    assert_same_run(a, plain, b, offloaded)


# ---- errors


def test_bad_arguments():
    p = leaf(torch.ones(2))
    with pytest.raises(TypeError, match=r"optimizer: expected an optimizer of tw.optim, got SGD"):
        tw.optim.Offload(torch.optim.SGD([p], lr=0.1))
    with pytest.raises(ValueError, match="chunk_mb: expected at least 0"):
        tw.optim.Offload(tw.optim.AdamW([p]), chunk_mb=-1.0)
    with pytest.raises(ValueError, match="backend None, 'cpu' or 'torch', got 'triton'"):
        tw.optim.Offload(tw.optim.AdamW([p], backend="triton"))
    elsewhere = torch.ones(2, device="meta", requires_grad=True)
    with pytest.raises(ValueError, match="expected parameters on one device, got cpu, meta"):
        tw.optim.Offload(tw.optim.AdamW([p, elsewhere]))
    optimizer = tw.optim.Offload(tw.optim.AdamW([p]))
    with pytest.raises(ValueError, match="expected parameters on one device, got cpu, meta"):
        optimizer.add_param_group({"params": [elsewhere]})
    with pytest.raises(ValueError, match="listed twice"):
        q = leaf(torch.ones(1))
        optimizer.add_param_group({"params": [q, q]})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    p.grad = torch.ones(2)
    optimizer.step()
    assert (p < 1).all()


# ---- the CUDA engine


class Recorder:
    """`torch.cuda` as far as the engine uses it, writing down who waits for whom."""

    def __init__(self):
        self.log, self.current = [], "main"

    class Stream:
        def __init__(self, owner, name):
            self.owner, self.name = owner, name

        def wait_stream(self, other):
            self.owner.log.append(f"{self.name} waits for {other.name}")

    class Event:
        def __init__(self, owner):
            self.owner = owner

        def record(self, stream):
            self.name = stream.name
            self.owner.log.append(f"event on {stream.name}")

        def synchronize(self):
            self.owner.log.append(f"host waits for {self.name}")


def test_the_cuda_engine_waits_for_the_right_streams(monkeypatch):
    """Without a GPU: the calls that the engine makes, with ordinary tensors."""
    r = Recorder()
    names = itertools.cycle(["down", "up"])
    main = Recorder.Stream(r, "main")

    class Using:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            r.log.append(f"on {self.stream.name}")

        def __exit__(self, *_):
            r.log.append("off")

    fake = types.SimpleNamespace(
        Stream=lambda device: Recorder.Stream(r, next(names)), Event=lambda blocking: Recorder.Event(r),
        current_stream=lambda device: main, stream=Using,
    )  # fmt: skip
    monkeypatch.setattr(_copy_engine.torch, "cuda", fake)
    engine = _copy_engine.CudaCopies(torch.device("cuda", 0))
    h, d = torch.zeros(3), torch.ones(3)
    engine.begin()
    assert r.log == ["down waits for main", "up waits for main"]
    r.log.clear()
    engine.synchronize(engine.copy_down([h], [d]))
    assert h.tolist() == [1, 1, 1]
    assert r.log == ["on down", "event on down", "off", "host waits for down"]
    r.log.clear()
    engine.copy_up([d], [h * 5])
    engine.finish()
    assert d.tolist() == [5, 5, 5]
    assert r.log == ["on up", "event on up", "off", "main waits for up"]
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert other.device == engine.device and other.down is not engine.down


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_has_the_bits_of_the_cpu(dtype):
    """A real model and streams: forward and backward follow each step at once."""
    runs = []
    for device in ("cpu", "cuda"):
        params = [leaf(p.detach().to(device)) for p in parameters(dtype)]
        optimizer = tw.optim.AdamW(params, lr=0.05)
        if device == "cuda":
            optimizer = tw.optim.Offload(optimizer, chunk_mb=SMALL)
        for step in range(4):
            generator = torch.Generator("cpu").manual_seed(step)
            for p in params:
                g = torch.randn(p.shape, generator=generator, device="cpu")
                p.grad = (
                    g.to(device, dtype) + p.detach()
                )  # reads the parameter that was just sent up
            optimizer.step()
        runs.append((params, optimizer))
    (a, plain), (b, offloaded) = runs
    assert isinstance(offloaded._engine, _copy_engine.CudaCopies)
    assert all(t.is_pinned() for t in offloaded._buffers)
    down = [q.detach().cpu() for q in b]
    state = {d: offloaded.state[q] for d, q in zip(down, b)}
    assert_same_run(a, plain, down, types.SimpleNamespace(state=state))
