"""The virtual GPU against a real one: the CUDA kernels of every op, on the same inputs, on both."""

import numerics
import pytest
import torch
import trainwright as tw
import vgpu_backend
from trainwright import dispatch

pytestmark = pytest.mark.gpu

# Copies, sums, products and correctly rounded roots and quotients: the same bits on both. The others use approximate
# instructions (ex2, rsqrt, tanh), which the virtual GPU rounds better than the hardware.
EXACT = {"bucket_pack", "bucket_unpack", "ordered_sum", "rope"}


@pytest.fixture(scope="module", autouse=True)
def _virtual_gpu():
    if vgpu_backend.reason() != "ok":
        pytest.skip(f"CUDA kernels on the virtual GPU: {vgpu_backend.reason()}")
    vgpu_backend.install()


def results(op, backend, device):
    torch.manual_seed(0)
    with torch.device("cpu"), tw.use_backend(backend):
        return [t.detach().cpu() for t in dispatch.self_checks()[op](backend, torch.device(device))]


@pytest.mark.parametrize("op", sorted(vgpu_backend.ops_with_cuda()))
def test_same_results_as_the_device(op):
    real, virtual = results(op, "cuda", "cuda"), results(op, "vgpu", "cpu")
    assert len(real) == len(virtual) > 0
    for a, b in zip(real, virtual):
        if op in EXACT:
            assert numerics.same_bits(a, b)
        else:
            limit = max(4e-6, 2 * torch.finfo(a.dtype).eps)
            torch.testing.assert_close(a, b, rtol=limit, atol=limit)
