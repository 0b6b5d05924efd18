"""Adam checkpoints of other packages, built here from their documented layouts, and changes of the storage format."""

import copy
import io

import pytest
import torch
import trainwright as tw
from numerics import same_bits
from trainwright.ops import _optimizer_formats as formats

from optim.classes import (
    ALL,
    TORCH,
    assert_same_run,
    copies,
    give_gradients,
    leaf,
    parameters,
    train,
)

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
ADAM = [o for o in TORCH if "Adam" in o.name]


def reference(steps=3, cls=torch.optim.AdamW, **changes):
    """A run of torch's, from which the foreign checkpoints are made."""
    params = parameters()
    optimizer = cls(params, foreach=False, **{**OPTIONS, **changes})
    train(optimizer, params, range(steps))
    return params, optimizer


def moments(optimizer):
    states = optimizer.state_dict()["state"]
    return {k: {n: s[n].clone() for n in ("exp_avg", "exp_avg_sq")} for k, s in states.items()}


def group(optimizer, **more):
    params = optimizer.state_dict()["param_groups"][0]["params"]
    return {k: optimizer.param_groups[0][k] for k in OPTIONS} | {"params": params} | more


def apex(optimizer, steps=3, capturable=False):
    count = torch.tensor([steps], dtype=torch.int32) if capturable else steps
    return {
        "state": moments(optimizer),
        "param_groups": [group(optimizer, bias_correction=True, step=count)],
    }


def deepspeed_cpu(optimizer, steps=3):
    states = {k: {"step": steps, **s} for k, s in moments(optimizer).items()}
    return {
        "state": states,
        "param_groups": [group(optimizer, bias_correction=True, amsgrad=False)],
    }


def deepspeed_fused(optimizer, steps=3):
    """Only the last parameter counts (DeepSpeed #8471); its count was used for all."""
    states = {k: {"step": 0, **s} for k, s in moments(optimizer).items()}
    states[max(states)]["step"] = steps
    return {"state": states, "param_groups": [group(optimizer, bias_correction=True, step=0)]}


def bitsandbytes_32bit(optimizer, steps=3):
    states = {
        k: {"step": steps, "state1": s["exp_avg"], "state2": s["exp_avg_sq"]}
        for k, s in moments(optimizer).items()
    }
    return {"state": states, "param_groups": [group(optimizer)]}


FOREIGN = {
    "apex": apex,
    "apex, capturable": lambda o: apex(o, capturable=True),
    "DeepSpeed CPUAdam": deepspeed_cpu,
    "DeepSpeed FusedAdam": deepspeed_fused,
    "bitsandbytes": bitsandbytes_32bit,
}


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---- reading


@pytest.mark.parametrize("coupled", [False, True], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_run_goes_on_from_another_package_s_checkpoint(name, coupled):
    """In ours directly, and in torch's by `import_adam_state`."""
    if coupled and name == "bitsandbytes":
        pytest.skip("its Adam decouples weight decay: test_bitsandbytes_adam_decays_like_adamw")
    plain_class = torch.optim.Adam if coupled else torch.optim.AdamW
    a, plain = reference(cls=plain_class)
    saved = through_a_file(FOREIGN[name](plain))
    before = copy.deepcopy(saved)
    b, c = copies(a), copies(a)
    ours = (tw.optim.Adam if coupled else tw.optim.AdamW)(b, lr=0.5)
    ours.load_state_dict(saved)
    theirs = plain_class(c, lr=0.5, foreach=False)
    theirs.load_state_dict(tw.optim.import_adam_state(saved))
    assert saved["param_groups"] == before["param_groups"]  # nothing was changed in place
    assert [s.keys() for s in saved["state"].values()] == [
        s.keys() for s in before["state"].values()
    ]
    assert (
        ours.param_groups[0]["lr"] == OPTIONS["lr"]
        and "bias_correction" not in ours.param_groups[0]
    )
    for o, params in ((plain, a), (ours, b), (theirs, c)):
        train(o, params, range(3, 6))
    for p, q, r in zip(a, b, c):
        torch.testing.assert_close(q, p)
        torch.testing.assert_close(r, p)
        assert ours.state[q]["step"].item() == 6 == theirs.state[r]["step"].item()


def test_bitsandbytes_adam_decays_like_adamw():
    a, plain = reference()
    b = copies(a)
    ours = tw.optim.Adam(b, lr=0.5)
    ours.load_state_dict(bitsandbytes_32bit(plain))
    assert ours.param_groups[0]["decoupled_weight_decay"] is True
    train(plain, a, range(3, 5))
    train(ours, b, range(3, 5))
    for p, q in zip(a, b):
        torch.testing.assert_close(p, q)


def quantised(x, signed, block):
    """codes, qmap, absmax: the value of a code is qmap[code] · absmax of its block. The map is a cube here, and its
    order is not that of the codes, so that only the documented meaning gives the right values."""
    line = torch.linspace(-1, 1, 256) if signed else torch.linspace(0, 1, 256)
    qmap = (line**3)[torch.randperm(256, generator=torch.Generator().manual_seed(3))]
    flat = x.reshape(-1)
    blocks = flat.split(block)
    absmax = torch.stack([b.abs().max() for b in blocks])
    scaled = torch.cat([b / m.clamp(min=1e-30) for b, m in zip(blocks, absmax)])
    codes = (scaled.unsqueeze(1) - qmap).abs().argmin(1).to(torch.uint8)
    return codes.view(x.shape), qmap, absmax


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "as FSDP saves it"])
@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "int8"], ids=str)
def test_bitsandbytes_8_bit(block, state_dtype, nested):
    """Codes become numbers; what is too small for 8 bits there is fp32 in the same checkpoint."""
    torch.manual_seed(0)
    p, small = leaf(torch.randn(71, 73)), leaf(torch.randn(100))
    m, v = torch.randn(71, 73) * torch.rand(71, 1), torch.rand(71, 73) ** 4
    first, second = quantised(m, True, block), quantised(v, False, block)
    state = {"state1": first[0], "qmap1": first[1], "absmax1": first[2],
             "state2": second[0], "qmap2": second[1], "absmax2": second[2]}  # fmt: skip
    state = {"step": 11, **({"__bnb_optimizer_quant_state__": state} if nested else state)}
    other = {"step": 11, "state1": m[0].repeat(2)[:100], "state2": v[0].repeat(2)[:100]}
    saved = {"state": {0: state, 1: other}, "param_groups": [{**OPTIONS, "params": [0, 1]}]}
    o = tw.optim.AdamW([p, small], state_dtype=state_dtype)
    o.load_state_dict(through_a_file(saved))
    if state_dtype == torch.float32:
        for i in range(0, 71 * 73, 97):  # the meaning, element by element
            value = first[1][first[0].view(-1)[i].long()] * first[2][i // block]
            assert same_bits(o.state[p]["exp_avg"].view(-1)[i], value)
    got = o.state[p]["exp_avg"], o.state[p]["exp_avg_sq"]
    if state_dtype == "int8":
        got = [
            formats.int8_decode(x, o.state[p][n + "_scale"])
            for x, n in zip(got, ("exp_avg", "exp_avg_sq"))
        ]
    for mine, exact in zip(
        got, (m, v)
    ):  # the cube's steps are at most 3/128 of the block's largest value
        assert (mine.float() - exact).abs().max() < 0.035 * exact.abs().max()
    if state_dtype != "int8":
        torch.testing.assert_close(
            o.state[small]["exp_avg"].float(), other["state1"], rtol=0.01, atol=0
        )
    assert o.state[p]["step"].item() == o.state[small]["step"].item() == 11
    train(o, [p, small], range(1))


def apex_without(key):
    def change(saved):
        del saved["param_groups"][0][key]

    return change


def set_group(**values):
    return lambda saved: saved["param_groups"][0].update(values)


def set_state(**values):
    return lambda saved: saved["state"][0].update(values)


CODES = torch.zeros(300, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "change", "text"),
    [
        (apex, set_group(bias_correction=False), r"\['bias_correction'\]: expected True .*got False"),
        (apex, apex_without("step"), r"\['step'\]: expected Apex's step count, got None"),
        (apex, set_group(grad_averaging=True), "expected the options of Adam, got 'grad_averaging'"),
        (bitsandbytes_32bit, set_group(alpha=5.0), "expected the options of Adam, got 'alpha'"),
        (bitsandbytes_32bit, set_state(state2=None), r"state\[0\]: state2: expected one of Adam's two moments"),
        (bitsandbytes_32bit, set_state(state1=CODES), r"state\[0\]: qmap1: expected 256 values, got None"),
        (bitsandbytes_32bit, set_state(state1=CODES, qmap1=torch.zeros(256), max1=torch.ones(1)),
         "absmax1: expected block-wise 8-bit state"),
        (bitsandbytes_32bit, set_state(state1=CODES, qmap1=torch.zeros(256), absmax1=torch.ones(5)),
         "absmax1: expected 2 or 1 blocks for 300 codes, got 5"),
        (bitsandbytes_32bit, set_state(state1=torch.zeros(5)), r"exp_avg: expected shape \(300,\), got \(5,\)"),
    ],
)  # fmt: skip
def test_what_means_something_else_is_an_error(make, change, text):
    a, plain = reference()
    saved = make(plain)
    change(saved)
    ours = tw.optim.AdamW(a)
    train(ours, a, range(1))
    before = copy.deepcopy(ours.state_dict()["state"])
    with pytest.raises(ValueError, match=text):
        ours.load_state_dict(saved)
    for k, s in ours.state_dict()["state"].items():
        assert all(same_bits(v, before[k][n]) for n, v in s.items())


def test_a_zero_shard_and_other_classes_are_errors():
    a, plain = reference()
    with pytest.raises(ValueError, match=r"consolidate it first.*keys .*base_optimizer_state"):
        tw.optim.import_adam_state({"base_optimizer_state": {}, "loss_scaler": None})
    for name in ("SGD", "RMSprop", "Lion", "Lamb"):
        with pytest.raises(ValueError, match=f"{name}.load_state_dict: .* apex's"):
            getattr(tw.optim, name)(a, lr=0.1).load_state_dict(apex(plain))


# ---- writing


@pytest.mark.parametrize("kind", ["ours", "ours, int8", "torch", "offload"])
@pytest.mark.parametrize("layout", ["torch", "apex", "deepspeed", "bitsandbytes"])
def test_a_checkpoint_comes_back_from_every_layout(layout, kind):
    a = parameters()
    options = {"state_dtype": "int8"} if kind == "ours, int8" else {}
    if kind == "torch":
        first = torch.optim.AdamW(a, foreach=False, **OPTIONS)
    else:
        first = tw.optim.AdamW(a, **OPTIONS, **options)
    if kind == "offload":
        first = tw.optim.Offload(first)
    train(first, a, range(3))
    saved = through_a_file(tw.optim.export_adam_state(first, layout))
    assert tw.optim.checkpoint.layout_of(saved) == layout
    b = copies(a)
    second = tw.optim.AdamW(b, lr=0.5)
    second.load_state_dict(saved)
    for p, q in zip(a, b):
        mine, theirs = first.state[p], second.state[q]
        assert float(theirs["step"]) == 3.0
        for n in ("exp_avg", "exp_avg_sq"):
            value = mine[n]
            if kind == "ours, int8":
                value = formats.int8_decode(value, mine[n + "_scale"])
            assert torch.equal(theirs[n], value) and theirs[n] is not value
    for key in OPTIONS:
        assert second.param_groups[0][key] == OPTIONS[key]


def test_the_layouts_that_are_written():
    a = parameters()[:2]
    o = tw.optim.AdamW(a, **OPTIONS)
    train(o, a, range(2))
    export = tw.optim.export_adam_state
    state, (g,) = export(o, "apex")["state"], export(o, "apex")["param_groups"]
    assert state[0].keys() == {"exp_avg", "exp_avg_sq"}
    assert g == {**OPTIONS, "params": [0, 1], "bias_correction": True, "step": 2}
    state, (g,) = export(o, "deepspeed")["state"], export(o, "deepspeed")["param_groups"]
    assert state[1].keys() == {"step", "exp_avg", "exp_avg_sq"} and type(state[1]["step"]) is int
    assert g == {**OPTIONS, "params": [0, 1], "bias_correction": True, "amsgrad": False}
    state, (g,) = export(o, "bitsandbytes")["state"], export(o, "bitsandbytes")["param_groups"]
    assert (
        state[1].keys() == {"step", "state1", "state2"}
        and state[1]["state1"].dtype == torch.float32
    )
    assert g == {**OPTIONS, "params": [0, 1]}
    plain = torch.optim.AdamW(copies(a))
    plain.load_state_dict(export(o, "torch"))
    plain.step()


def test_what_a_layout_cannot_say_is_an_error():
    export = tw.optim.export_adam_state
    params = [leaf(torch.ones(2)), leaf(torch.ones(3))]
    for key in ("amsgrad", "maximize"):
        for layout in ("apex", "deepspeed", "bitsandbytes"):
            with pytest.raises(ValueError, match=f"{key}: expected False for layout '{layout}'"):
                export(tw.optim.AdamW(params, **{key: True}), layout)
    with pytest.raises(ValueError, match="weight_decay: expected decoupled decay, or 0"):
        export(tw.optim.Adam(params, weight_decay=0.1), "bitsandbytes")
    export(tw.optim.Adam(params), "bitsandbytes")
    o = tw.optim.AdamW(params)
    train(o, params[:1], range(1))
    train(o, params, range(2))
    with pytest.raises(ValueError, match=r"step: expected one count for the group, got \[2, 3\]"):
        export(o, "apex")
    with pytest.raises(TypeError, match="expected Adam or AdamW, got SGD"):
        export(tw.optim.SGD(params), "apex")
    with pytest.raises(TypeError, match="expected an optimizer, got dict"):
        export({}, "apex")
    with pytest.raises(ValueError, match="layout: expected 'torch', 'apex'"):
        export(o, "optax")


# ---- storage formats

FORMATS = [(m, s) for m in ("fp32", "split16") for s in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("optimizer", ALL, ids=str)
@pytest.mark.parametrize(("masters", "state_dtype"), FORMATS, ids=str)
def test_a_format_and_back_loses_nothing(optimizer, masters, state_dtype):
    """From each format to fp32 masters and state, and back: the run has the bits of one that was left alone."""
    a, b = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {**optimizer.options, "master_weights": masters, "state_dtype": state_dtype}
    left, moved = optimizer.ours(a, **options), optimizer.ours(b, **options)
    for o, params in ((left, a), (moved, b)):
        train(o, params, range(2), torch.float32)
    tw.optim.convert_state(moved, state_dtype=torch.float32, master_weights="fp32")
    assert {moved.state[b[0]][n].dtype for n in (*optimizer.states, "master")} == {torch.float32}
    tw.optim.convert_state(moved, state_dtype=state_dtype, master_weights=masters)
    assert_same_run(a, left, b, moved)
    for o, params in ((left, a), (moved, b)):
        train(o, params, range(2, 4), torch.float32)
    assert_same_run(a, left, b, moved)


@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_int8_codes_and_back(optimizer):
    """A decoded state has the codes it came from; a scale may move by its last bit."""
    a = parameters()
    o = optimizer.ours(a, state_dtype="int8", **optimizer.options)
    train(o, a, range(3))
    before = copy.deepcopy(o.state_dict()["state"])
    tw.optim.convert_state(o, state_dtype=torch.float32)
    for k, s in o.state_dict()["state"].items():
        for n in optimizer.states:
            exact = formats.int8_decode(before[k][n], before[k][n + "_scale"])
            assert same_bits(s[n], exact) and n + "_scale" not in s
    tw.optim.convert_state(o, state_dtype="int8")
    for k, s in o.state_dict()["state"].items():
        for n in optimizer.states:
            assert torch.equal(s[n], before[k][n])
            torch.testing.assert_close(s[n + "_scale"], before[k][n + "_scale"], rtol=3e-7, atol=0)


def test_masters_made_into_remainders_round_ties_as_split16_does():
    """A master half-way between two bf16 numbers: the cast goes to even, split16 away from zero."""
    exact = torch.tensor([1.00390625, 1.01171875, -1.00390625, 1.0])
    p = leaf(exact.to(torch.bfloat16))
    o = tw.optim.AdamW([p], lr=0.0, weight_decay=0.0)
    train(o, [p], range(1))
    o.state[p]["master"].copy_(exact)
    tw.optim.convert_state(o, master_weights="split16")
    assert torch.equal(formats.split16_join(p.detach(), o.state[p]["master"]), exact)


def test_remainders_loaded_from_fp32_masters_fit_their_parameters():
    """The parameters of the checkpoint were cast from the masters: on ties to even, one bf16 step from split16's."""
    exact = torch.tensor([1.00390625, 1.01171875, -1.00390625, 1.0, 1.0, float("inf")])
    p, q = (leaf(exact.to(torch.bfloat16)) for _ in range(2))
    o = tw.optim.AdamW([p])
    train(o, [p], range(1))
    o.state[p]["master"].copy_(exact)
    split = tw.optim.AdamW([q], master_weights="split16")
    split.load_state_dict(o.state_dict())
    assert torch.equal(formats.split16_join(q.detach(), split.state[q]["master"]), exact)
    away = torch.tensor([1.0078125, 1.015625, -1.0078125, 1.0, 1.0, float("inf")])
    assert torch.equal(q.detach(), away.to(torch.bfloat16))
    # Not this checkpoint's parameters: left alone.
    other = leaf(torch.full_like(exact, 3.0).to(torch.bfloat16))
    tw.optim.AdamW([other], master_weights="split16").load_state_dict(o.state_dict())
    assert torch.equal(other.detach(), torch.full_like(other, 3.0))


def test_masters_are_dropped_and_made_on_request():
    a = parameters(torch.bfloat16)
    o = tw.optim.AdamW(a, lr=0.02)
    train(o, a, range(2))
    tw.optim.convert_state(o, master_weights="none", state_dtype="int8")
    assert "master" not in o.state[a[0]] and o.state[a[0]]["exp_avg_sq"].dtype == torch.uint8
    train(o, a, range(2, 3))
    assert "master" not in o.state[a[0]]
    tw.optim.convert_state(o, master_weights="fp32")
    value = a[0].detach().clone()
    give_gradients(a, 3)
    for p in a:
        p.grad.zero_()
    o.param_groups[0].update(lr=0.0)
    o.step()
    assert torch.equal(o.state[a[0]]["master"], value.float())


def test_bad_conversions_change_nothing():
    p = leaf(torch.ones(3, dtype=torch.float16))
    o = tw.optim.AdamW([p], lr=0.02)
    train(o, [p], range(1))
    before = o._options
    for options, error in (
        ({"master_weights": "split16"}, ValueError),
        ({"state_dtype": torch.float16}, ValueError),
    ):
        with pytest.raises(error):
            tw.optim.convert_state(o, **options)
    assert o._options == before and o.state[p]["master"].dtype == torch.float32
    with pytest.raises(TypeError, match=r"expected an optimizer of tw.optim, got AdamW"):
        tw.optim.convert_state(torch.optim.AdamW([p]), state_dtype="int8")
