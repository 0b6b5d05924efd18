"""Which parameters stage 3 of ZeRO gathers together, where each lies in its block's memory, and who owns what of it.

A block is a module whose parameters have at most a given size, or the parameters that a larger module has beside its
children. Its parameters lie end to end in one flat memory, row-major, one memory per dtype, that is cut into W equal
parts: so an all-gather of the parts, in place, makes all of them whole. Plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from trainwright.parallel._shards import ALIGNED, Range


@dataclass(frozen=True)
class Block:
    """Parameters `params` (indices in order of registration) of `anchor`, a module's name, at `begins` of the flat
    memory of `numel` elements, of which rank r owns [cuts[r], cuts[r + 1]).
    """

    index: int
    anchor: str
    dtype: str
    params: tuple[int, ...]
    begins: tuple[int, ...]
    numel: int
    cuts: tuple[int, ...]


def find_blocks(
    module: nn.Module,
    params: Sequence[nn.Parameter],
    *,
    limit_bytes: int,
    world: int,
    unit: int = 1,
) -> list[Block]:
    """Blocks of about `limit_bytes` or less, in order of registration; together all of `params`.

    Args:
        module: their owner. A parameter of several modules belongs to the first of them.
        params: in order of registration.
        limit_bytes: a module of more is divided into its children; a parameter is never divided between blocks.
        world: number of ranks.
        unit: elements of a parameter that one rank must own together.
    """
    index = {id(p): i for i, p in enumerate(params)}
    taken: set[int] = set()
    blocks: list[Block] = []

    def free(module: nn.Module, recurse: bool) -> list[int]:
        found = [index[id(p)] for p in module.parameters(recurse) if id(p) in index]
        return [i for i in found if i not in taken]

    def make(anchor: str, members: list[int]) -> None:
        taken.update(members)
        by_dtype: dict[str, list[int]] = {}
        for i in members:
            by_dtype.setdefault(str(params[i].dtype).removeprefix("torch."), []).append(i)
        for dtype, same in by_dtype.items():
            sizes = [params[i].numel() for i in same]
            blocks.append(_block(len(blocks), anchor, dtype, same, sizes, world, unit))

    def visit(prefix: str, module: nn.Module) -> None:
        members = free(module, True)
        if not members:
            return
        size = sum(params[i].numel() * params[i].itemsize for i in members)
        if size <= limit_bytes:
            make(prefix, members)
            return
        if own := free(module, False):
            make(prefix, own)
        for name, child in module.named_children():
            visit(f"{prefix}.{name}" if prefix else name, child)

    visit("", module)
    return blocks


def _block(
    index: int,
    anchor: str,
    dtype: str,
    members: Sequence[int],
    sizes: Sequence[int],
    world: int,
    unit: int,
) -> Block:
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // ALIGNED) * ALIGNED  # kernels like parameters that begin on a cache line
    numel = begins[-1] + sizes[-1]
    cuts = [0]
    for r in range(1, world):
        cuts.append(max(cuts[-1], _cut(numel * r // world, begins, sizes, unit)))
    return Block(index, anchor, dtype, tuple(members), tuple(begins), numel, (*cuts, numel))


def _cut(want: int, begins: Sequence[int], sizes: Sequence[int], unit: int) -> int:
    """The position near `want` where no unit of a parameter is cut."""
    i = max(i for i, begin in enumerate(begins) if begin <= want)
    inside = want - begins[i]
    step = max(unit, ALIGNED if sizes[i] >= 256 * ALIGNED else 1)
    return begins[i] + min((inside + step // 2) // step * step, sizes[i])


def ranges_of(blocks: Sequence[Block], sizes: Sequence[int]) -> list[list[Range]]:
    """Per parameter its ranges in ascending order, as `divide` gives them for the other stages."""
    ranges: list[list[Range]] = [[] for _ in sizes]
    for block in blocks:
        for i, begin in zip(block.params, block.begins):
            for owner, (first, last) in enumerate(zip(block.cuts, block.cuts[1:])):
                first, last = max(first - begin, 0), min(last - begin, sizes[i])
                if first < last:
                    ranges[i].append(Range(first, last, owner))
            if not sizes[i]:
                ranges[i].append(Range(0, 0, 0))
    return ranges
