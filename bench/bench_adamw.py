"""AdamW on the 148 parameters of GPT-2 124M: one step, and the whole loss-scaled, clipped step, against torch's."""

import pytest
import torch
import trainwright as tw

BLOCK = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,),
         (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]  # fmt: skip
GPT2 = [(50257, 768), (1024, 768), *(BLOCK * 12), (768,), (768,)]
SMALL = [(1024,)] * 1000
SHAPES = {"gpt2-124m": GPT2, "1000 x 1024": SMALL, "1 x 1024000": [(1024000,)]}
F32, BF16 = torch.float32, torch.bfloat16
FORMATS = {  # parameter, gradient, master, state, bytes per parameter
    "fp32": (F32, F32, "none", F32, 28),
    "bf16, fp32 master": (BF16, BF16, "fp32", F32, 28),
    "bf16, fp32 master and gradient": (BF16, F32, "fp32", F32, 30),
    "all bf16": (BF16, BF16, "none", BF16, 14),
    "all bf16, stochastic": (BF16, BF16, "none", BF16, 14),
    "split16, bf16 state": (BF16, BF16, "split16", BF16, 18),
    "fp32, int8 state": (F32, F32, "none", "int8", 16 + 4 / 64),
    "bf16, int8 state": (BF16, BF16, "none", "int8", 10 + 4 / 64),
}


def parameters(shapes, device, dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]
    for p in params:
        p.requires_grad_().grad = torch.randn(p.shape, generator=generator, device=device).to(dtype)
    return params


def stepping(params, step):
    """A call that does one step and returns a few parameters to check."""

    def call():
        step()
        return [p.detach() for p in params[:3]]

    return call


def deepspeed_calls(shapes, device, dtype=torch.float32, **options):
    """DeepSpeed's CPUAdam as a provider, where it is installed. It compiles itself for the CPU it runs on, whatever
    instruction set the others are held to."""
    if device.type != "cpu":
        return {}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    params = parameters(shapes, device, dtype)
    optimizer = DeepSpeedCPUAdam(params, weight_decay=0.01, adamw_mode=True, **options)
    return {"DeepSpeed": stepping(params, optimizer.step)}


def cast_step(params, device):
    """What torch offers for bf16 parameters with fp32 masters: cast the gradients, step, cast the parameters."""
    masters = [p.detach().float().requires_grad_() for p in params]
    for m in masters:
        m.grad = torch.empty_like(m)
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step():
        for m, p in zip(masters, params):
            m.grad.copy_(p.grad)
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(masters, params):
                p.copy_(m)

    return step


def exact(shapes, device, dtype=torch.float32, max_norm=None):
    """One step of the parameters that are checked, in fp64."""

    def call():
        params = parameters(shapes, device, dtype)
        factor = 1.0
        if max_norm is not None:
            squares = sum(p.grad.double().square().sum() for p in params)
            factor = min(1.0, max_norm / (squares.sqrt().item() + 1e-6))
        wide = [p.detach().double().requires_grad_() for p in params[:3]]
        for w, p in zip(wide, params):
            w.grad = p.grad.double() * factor
        torch.optim.AdamW(wide, foreach=False).step()
        return [w.detach() for w in wide]

    return call


@pytest.mark.parametrize("name", SHAPES)
def test_adamw_fp32(compare, device, name):
    shapes = SHAPES[name]
    a, b, c = (parameters(shapes, device) for _ in range(3))
    calls = {
        "trainwright": stepping(a, tw.optim.AdamW(a).step),
        "torch fused": stepping(b, torch.optim.AdamW(b, fused=True).step),
        "torch eager": stepping(c, torch.optim.AdamW(c, foreach=True).step),
        **deepspeed_calls(shapes, device),
    }
    n = sum(p.numel() for p in a)
    compare(
        "adamw",
        "step",
        name,
        torch.float32,
        calls,
        exact(shapes, device),
        bytes_moved=28 * n,
        in_place=True,
    )


def test_adamw_bf16_with_master(compare, device):
    a, b = (parameters(GPT2, device, torch.bfloat16) for _ in range(2))
    calls = {
        "trainwright": stepping(a, tw.optim.AdamW(a).step),
        "torch fused": stepping(b, cast_step(b, device)),
    }
    n = sum(p.numel() for p in a)
    reference = exact(GPT2, device, torch.bfloat16)
    compare(
        "adamw",
        "step, fp32 master",
        "gpt2-124m",
        torch.bfloat16,
        calls,
        reference,
        bytes_moved=28 * n,
        in_place=True,
    )


def test_adamw_amp(compare, device):
    """Unscale, norm, clip, step, update. The gradients are put back before each call: torch's calls rewrite them, and
    would soon find nothing left to clip."""
    a, b = (parameters(GPT2, device) for _ in range(2))
    gradients = [p.grad.clone() for p in b]
    ours, theirs = tw.optim.AdamW(a, max_grad_norm=1.0), torch.optim.AdamW(b, fused=True)
    scaler = tw.LossScaler(1.0)
    grad_scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1.0)
    for s in (scaler, grad_scaler):
        s.scale(torch.ones((), device=device))

    def ours_step():
        scaler.step(ours)
        scaler.update()

    def theirs_step():
        grad_scaler.unscale_(theirs)
        torch.nn.utils.clip_grad_norm_(b, 1.0)
        grad_scaler.step(theirs)
        grad_scaler.update()

    def restore():
        for p, q, g in zip(a, b, gradients):
            p.grad.copy_(g)
            q.grad.copy_(g)

    calls = {"trainwright": stepping(a, ours_step), "torch fused": stepping(b, theirs_step)}
    n = sum(p.numel() for p in a)
    reference = exact(GPT2, device, max_norm=1.0)
    compare(
        "adamw",
        "amp step",
        "gpt2-124m",
        torch.float32,
        calls,
        reference,
        bytes_moved=32 * n,
        in_place=True,
        before=restore,
    )


def elements(device):
    """512M where 24 bytes each fit into the free memory, else the largest power of two that does; 16M on a CPU."""
    if device.type != "cuda":
        return 1 << 24
    free = torch.cuda.mem_get_info(device)[0] - (4 << 30)  # the bound's buffers
    return min(1 << 29, 1 << max(20, (free // 24).bit_length() - 1))


@pytest.mark.parametrize("label", FORMATS)
def test_adamw_formats(compare, device, label):
    """One large tensor in each storage format, against a copy of as many bytes (tests hold the results)."""
    dtype, grad, master, state, per_element = FORMATS[label]
    n = elements(device)
    p = torch.ones(n, dtype=dtype, device=device, requires_grad=True)
    p.grad_dtype = None
    p.grad = torch.full((n,), 0.5, dtype=grad, device=device)
    optimizer = tw.optim.AdamW(
        [p], master_weights=master, state_dtype=state, stochastic_rounding="stochastic" in label
    )
    calls = {"trainwright": stepping([p], optimizer.step)}
    compare(
        "adamw",
        f"step, {label}",
        (n,),
        dtype,
        calls,
        None,
        bytes_moved=per_element * n,
        in_place=True,
    )


# Other optimizers: options, bytes per parameter in fp32, whether torch has a fused step on the CPU.
OTHERS = {
    "Adam": ({}, 28, True),
    "SGD": ({"lr": 1e-3, "momentum": 0.9}, 20, True),
    "RMSprop": ({}, 20, False),
    "Lion": ({}, 20, None),
    "Lamb": ({}, 40, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_large_tensor(compare, device, name):
    """Of the other optimizers, against a copy of as many bytes."""
    options, per_element, _ = OTHERS[name]
    n = elements(device)
    p = torch.ones(n, device=device, requires_grad=True)
    p.grad = torch.full((n,), 0.5, device=device)
    calls = {"trainwright": stepping([p], getattr(tw.optim, name)([p], **options).step)}
    size = per_element * n
    compare(name.lower(), "step", (n,), torch.float32, calls, None, bytes_moved=size, in_place=True)
