"""Memory that a storage has for a time. What is left of it, in views that someone has kept, reads as NaN on a CPU.

A storage without memory has a null pointer, and reading a view of it would end the process. So on a CPU it then points
to pages of NaN that all such storages share: one MiB of memory, mapped again and again to the size of the largest. What
is written there goes nowhere that anybody should look. (On a GPU, and with torch before 2.13, which cannot exchange a
storage's pointer, reading such a view is an illegal access.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

NAN = b"\xff\x7f"  # in bf16 and fp16; twice it is one in fp32, four times in fp64
CHUNK_BYTES = 1 << 20
_swaps = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
_pages: list[
    tuple[int, int, Any]
] = []  # (bytes, address, owner): never given back, since views may be kept


def _nan_pages(nbytes: int) -> int:
    """The address of at least `nbytes` of NaN."""
    if _pages and _pages[-1][0] >= nbytes:
        return _pages[-1][1]
    size = -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES
    address, owner = _mapped(size) if hasattr(os, "memfd_create") else 0, None
    if not address:
        owner = torch.full((size // 2,), float("nan"), dtype=torch.float16)
        address = owner.data_ptr()
    _pages.append((size, address, owner))
    return address


def _mapped(size: int) -> int:
    """Or 0 if the system does not want to."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    usable, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10  # MAP_FIXED
    failed = ctypes.c_void_p(-1).value
    base: int = libc.mmap(None, size, usable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base == failed:
        return 0
    file = os.memfd_create("trainwright-nan")
    try:
        os.write(file, NAN * (CHUNK_BYTES // len(NAN)))
        for at in range(base, base + size, CHUNK_BYTES):
            if libc.mmap(at, CHUNK_BYTES, usable, mmap.MAP_PRIVATE | fixed, file, 0) == failed:
                return 0
    finally:
        os.close(file)
    return base


class Lent:
    """The memory of a storage, which it has at first. `nbytes` is what it has now."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage: Any = storage  # whose methods torch's stubs do not all know
        self._size = storage.nbytes()
        self.nbytes = self._size

    def give(self) -> None:
        if self.nbytes == self._size:
            return
        if self._exchanges:
            self._storage._swap_data_ptr_(torch.UntypedStorage(self._size))
        else:
            self._storage.resize_(self._size)
        self.nbytes = self._size

    def take_back(self) -> None:
        """But not from a numpy array: what has no owner that we know keeps its memory until it is asked for again."""
        if not self.nbytes or not self._storage.resizable():
            return
        if self._exchanges:
            make: Any = torch._C._construct_storage_from_data_pointer
            address = _nan_pages(self._size)
            self._storage._swap_data_ptr_(make(address, self._storage.device, self._size))
        else:
            self._storage.resize_(0)
        self.nbytes = 0

    @property
    def _exchanges(self) -> bool:
        return _swaps and self._storage.device.type == "cpu"
