"""Divergence, locks and waits: results must not depend on how lanes, warps and blocks take turns."""

from pathlib import Path

import pytest
import torch

vgpu = pytest.importorskip("trainwright.vgpu", reason="_vgpu is not built")

PTX = Path(__file__).parent / "ptx"
pytestmark = pytest.mark.timeout(60)  # a lost wake-up hangs


def load(threads=None):
    return vgpu.Device("sm_80", threads=threads).load_ptx((PTX / "control_flow.ptx").read_text())


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def module(request):
    return load(request.param)


def i32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def collatz(x):
    steps, h = 0, 1
    while x != 1:
        case = x % 7
        if case == 0:
            h = h * 31 + 7
        elif case == 1:
            h ^= h >> 3
        elif case == 2:
            h += x
        elif case == 3:
            h = int(f"{h:032b}"[::-1], 2)
        elif case == 4:
            h = h << 5 | h >> 27
        elif case == 5:
            h -= 0x9E3779B9
        else:
            h = ~h
        h &= 0xFFFFFFFF
        x = 3 * x + 1 if x % 2 else x // 2
        steps += 1
    return steps, h


def test_collatz_with_a_seven_way_switch(module):
    n = 300
    start = torch.arange(1, n + 1, dtype=torch.int32) * 7919 % 10007 + 1
    steps, hashes = i32(n), i32(n)
    module.launch("collatz", 3, 128, (start, steps, hashes, n))
    expected = [collatz(int(x)) for x in start]
    assert steps.tolist() == [s for s, _ in expected]
    assert [h & 0xFFFFFFFF for h in hashes.tolist()] == [h for _, h in expected]


def test_divergent_lanes_meet_again(module):
    # All 32 lanes do the same work or none: with joins, no more instructions than one lane needs.
    one, all_ = i32(1), i32(32)
    start = torch.full((32,), 97, dtype=torch.int32)
    alone = module.launch("collatz", 1, 1, (start, one, i32(1), 1)).warp_instructions
    together = module.launch("collatz", 1, 32, (start, all_, i32(32), 32)).warp_instructions
    assert together == alone
    # Different lengths: lanes that are done wait at the loop's end, so the warp costs what its branches cost.
    mixed = torch.arange(1, 33, dtype=torch.int32)
    cost = module.launch("collatz", 1, 32, (mixed, all_, i32(32), 32)).warp_instructions
    longest = max(collatz(x)[0] for x in range(1, 33))
    assert cost < longest * 90


def test_shuffles_in_divergent_branches(module):
    values = torch.randint(-1000, 1000, (64,), dtype=torch.int32)
    out = i32(64)
    module.launch("shuffle_in_branches", 1, 64, (values, out))
    for warp in range(2):
        v = values[32 * warp : 32 * warp + 32]
        expected = torch.full((32,), int(v[::2].max()), dtype=torch.int32)
        expected[1::2] = v[1::2].sum()
        expected[3::4] *= -1
        assert torch.equal(out[32 * warp : 32 * warp + 32], expected)


@pytest.mark.parametrize("grid", [1, 5])
def test_spin_lock_between_lanes(module, grid):
    n = grid * 96
    lock, counter, order = i32(1), i32(1), i32(n) - 1
    module.launch("spin_lock", grid, 96, (lock, counter, order))
    assert counter.item() == n and lock.item() == 0
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("grid", [1, 4])
def test_spin_lock_whose_holder_has_left_the_loop(module, grid):
    lock, counter = i32(1), i32(1)
    module.launch("spin_lock_loop", grid, 64, (lock, counter))
    assert counter.item() == grid * 64


def test_lanes_that_wait_for_each_other(module):
    flags, out = i32(32), i32(32)
    module.launch("lane_waits_for_lane", 1, 32, (flags, out))
    assert out.tolist() == list(range(31, -1, -1)) and flags.tolist() == [1] * 32


@pytest.mark.parametrize("grid", [2, 40])
def test_grid_wide_wait(module, grid):
    arrived, values, out = i32(1), i32(grid), i32(grid)
    module.launch("grid_wait", grid, 64, (arrived, values, out))
    assert out.tolist() == [grid * (grid + 1) // 2] * grid


def test_blocks_that_wait_for_the_one_before(module):
    n = 200
    values, out, ready = torch.arange(n, dtype=torch.int32), i32(n), i32(n)
    module.launch("chained_scan", n, 32, (values, out, ready))
    assert torch.equal(out, values.cumsum(0).int())


def test_local_memory(module):
    index = torch.randint(0, 64, (50,), dtype=torch.int32)
    out = i32(40)
    module.launch("local_memory", 1, 40, (index, out, 50))
    expected = []
    for thread in range(40):
        table = [i * i + thread for i in range(64)]
        for i, k in enumerate(index.tolist()):
            table[k & 63] += table[(k + i) & 63]
        total = 0
        for t in table:
            total = (total * 3 + t) & 0xFFFFFFFF
        expected.append(total - (1 << 32) if total >> 31 else total)
    assert out.tolist() == expected


def test_lanes_that_exit_do_not_hold_up_barriers(module):
    leaves = torch.randint(0, 2, (100,), dtype=torch.int32)
    leaves[32:64] = 1  # a whole warp
    out = i32(100)
    module.launch("early_exit", 1, 100, (leaves, out))
    stay = 1 - leaves
    assert torch.equal(out, stay * stay.sum().int())


# ---- what cannot go on


def test_waiting_for_ever_is_a_deadlock(module):
    with pytest.raises(vgpu.DeadlockError, match="wait for something that nobody changes") as error:
        module.launch("waits_for_ever", 3, 32, (i32(1),))
    assert error.value.kernel == "waits_for_ever"
    assert (
        "ld.volatile.global" in str(error.value)
        or "setp" in str(error.value)
        or "bra" in str(error.value)
    )


def test_a_skipped_barrier_is_a_deadlock(module):
    with pytest.raises(vgpu.DeadlockError) as error:
        module.launch("skipped_barrier", 1, 128, (i32(128),))
    text = str(error.value)
    assert "waits for barrier 0: 64 of 128 threads have arrived" in text and "source line" in text


def test_a_barrier_in_half_a_warp(module):
    with pytest.raises(
        vgpu.BarrierError, match="divergent: lanes 0xaaaaaaaa wait here for lanes 0x55555555"
    ) as error:
        module.launch("barrier_in_half_a_warp", 1, 64, (i32(64),))
    assert error.value.instruction.startswith("bar.sync") and error.value.source_line > 0
