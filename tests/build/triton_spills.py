"""Compiles the Triton optimizers in many storage formats and reports what spills, as JSON; test_triton_optimizers.py
runs it in a process of its own, with Triton's compiler.

    triton_spills.py OP all|pairs ARCH...
"""

import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from optim.op_cases import MASTERS, PRODUCT, STATES, pairs_of
from trainwright.kernels import _optimizer as driver

CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def forms_of(op, which):
    """Formats, with all states that the op may have; of elements in packs, and a few of elements one by one."""
    slots = (1 << len(op.states)) - 1
    rows = PRODUCT if which == "all" else pairs_of(PRODUCT)
    made = [
        driver.Format(
            f.dtype, f.grad, MASTERS[f.master], STATES[f.state], slots, f.stochastic, True
        )
        for f in rows
    ]
    return [*made, *(f._replace(aligned=False) for f in made[:: len(made) // 6])]


def kernels(name, which):
    """What to compile of an op: rows of `AOT`."""
    module = importlib.import_module(f"trainwright.kernels.{name}")
    if name == "muon":
        one = driver.aot(module.MOMENTUM, module._momentum_scalars, module._momentum,
                         forms_of(module.MOMENTUM, which))  # fmt: skip
        two = driver.aot(module.UPDATE, module._update_scalars, module._update,
                         forms_of(module.UPDATE, which))  # fmt: skip
        return [*one, *two]
    op, scalars, forms = module.OP, module._scalars, forms_of(module.OP, which)
    if name == "lamb":
        states = driver.aot(
            op, scalars, module._moments, forms, do=driver.STATES, direction=module._direction
        )
        return [
            *states,
            *driver.aot(op, scalars, module._apply, forms, do=driver.PARAMETER, lost=True)[1:],
        ]
    formula = module.adamw_update if name == "adamw" else module._update
    return [
        *driver.aot(op, scalars, formula, forms),
        *driver.aot(op, scalars, formula, forms[::5], lost=True)[1:],
    ]


def usage(cubin):
    """(registers, bytes of stack and local memory) of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return int(found[1]), int(found[2]) + int(found[3])


def main(op, which, archs):
    compiled, most, spilling = 0, 0, []
    for kernel, types, constants, warps, _, options in kernels(op, which):
        signature = {n: types.get(n, "constexpr").split(":")[0] for n in kernel.arg_names}
        divisible = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(kernel.arg_names)
            if types.get(n, "").startswith("*")
        }
        for arch in archs:
            source = ASTSource(kernel, signature, constants, attrs=divisible)
            target = GPUTarget("cuda", arch, 32)
            built = triton.compile(source, target=target, options={"num_warps": warps, **options})
            registers, local = usage(built.asm["cubin"])
            compiled += 1
            most = max(most, registers)
            if local:
                words = {k: str(v) for k, v in constants.items() if not callable(v)}
                spilling.append({"kernel": kernel.__name__, "arch": arch, "local": local, **words})
    print(json.dumps({"compiled": compiled, "registers": most, "spilling": spilling}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], [int(a) for a in sys.argv[3:]])
