"""Tensor maps (CUtensorMap) for kernels that copy tiles with the tensor memory accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright import _vgpu

# CUtensorMapDataType
_DRIVER_TYPES = {
    torch.uint8: 0, torch.int8: 0, torch.bool: 0, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0,
    torch.uint16: 1, torch.int16: 1, torch.uint32: 2, torch.int32: 3, torch.uint64: 4, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(
    tensor: torch.Tensor,
    box: Sequence[int],
    *,
    swizzle: int = 0,
    element_strides: Sequence[int] | None = None,
    fill_nan: bool = False,
) -> bytes:
    """The 128 bytes that describe a tensor to the virtual GPU's TMA: what cuTensorMapEncodeTiled makes.

    Pass them as a kernel argument (a struct by value), and the tensor in `memory=` of the launch.

    Args:
        tensor: of rank 1 to 5, its last dimension contiguous; strides in bytes are multiples of 16.
        box: elements of a tile, one number for each dimension, in the order of the tensor's dimensions.
        swizzle: bytes: 0 (none), 32, 64 or 128.
        element_strides: step between the elements of a tile along each dimension; default 1.
        fill_nan: what lies outside of the tensor reads as NaN, not as zero.

    Raises:
        TypeError, ValueError: an argument is not as above, with the rule that it breaks.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor_map: tensor: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _DRIVER_TYPES:
        raise TypeError(f"tensor_map: tensor: TMA has no element type {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor_map: tensor: expected a CPU tensor, got one on {tensor.device}")
    rank = tensor.dim()
    if not 1 <= rank <= 5:
        raise ValueError(f"tensor_map: tensor: expected rank 1 to 5, got {rank}")
    if tensor.stride(-1) != 1:
        raise ValueError("tensor_map: tensor: the last dimension must be contiguous")
    steps = tuple(element_strides) if element_strides is not None else (1,) * rank
    for name, values in (("box", box), ("element_strides", steps)):
        if len(values) != rank:
            raise ValueError(f"tensor_map: {name}: expected {rank} numbers, got {len(values)}")
        if any(not isinstance(v, int) or v < 1 for v in values):
            raise ValueError(f"tensor_map: {name}: expected positive ints, got {tuple(values)}")
    if swizzle not in _SWIZZLES:
        raise ValueError(f"tensor_map: swizzle: expected 0, 32, 64 or 128 bytes, got {swizzle!r}")
    size = tensor.element_size()
    encoded: bytes = _vgpu.encode_tiled(
        type=_DRIVER_TYPES[tensor.dtype],
        address=tensor.data_ptr(),
        dims=list(tensor.shape[::-1]),
        strides=[s * size for s in tensor.stride()[-2::-1]] if rank > 1 else [],
        box=list(box)[::-1],
        element_strides=list(steps)[::-1],
        interleave=0,
        swizzle=_SWIZZLES[swizzle],
        fill=int(fill_nan),
    )
    return encoded
