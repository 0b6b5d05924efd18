"""Schedules of split matrix products: right, as fast as the closed forms say, and every mutation of one is caught."""

import dataclasses
import functools
import itertools

import pytest
from trainwright.parallel import (
    Action,
    Schedule,
    ScheduleError,
    all_gather_matmul_schedule,
    all_gather_panels_schedule,
    matmul_all_reduce_schedule,
    matmul_reduce_scatter_schedule,
    summa_schedule,
)

SIZES = [[4], [3, 3], [1, 0], [5, 4, 4], [2, 0, 1], [0, 0, 0], [7, 7, 6, 6], [1, 1, 0, 0, 1]]
MESHES = [(1, 2), (2, 1), (2, 2), (1, 3), (2, 3)]


def reducing(reduce):
    """The two schedules that sum, with that order; one row or column per unit of a size, 5 of the other."""
    return (
        functools.partial(matmul_reduce_scatter_schedule, columns=5, reduce=reduce),
        functools.partial(
            matmul_all_reduce_schedule, rows=5, reduce=reduce, item_bytes=4, result_bytes=2
        ),
    )


def summa(mesh, product, overlap):
    """Panels held by every row and column of the mesh, one row of C empty."""
    rows, cols = mesh
    panels = [(k % cols, k % rows, 1 + k % 2) for k in range(3)]
    return summa_schedule(
        mesh, panels, [2, 0][:rows], [3, 1, 2][:cols], product=product, overlap=overlap
    )


SCHEDULES = [
    *(
        make(sizes, chunks=chunks, overlap=overlap)
        for make in (
            all_gather_matmul_schedule,
            functools.partial(all_gather_panels_schedule, columns=5),
            *reducing("ordered"),
            *reducing("ring"),
        )
        for sizes in SIZES
        for chunks in (1, 2, 5)
        for overlap in (True, False)
    ),
    *(
        summa(mesh, product, overlap)
        for mesh in MESHES
        for product in ("ab", "da", "db")
        for overlap in (True, False)
    ),
]


def test_all_are_right():
    for schedule in SCHEDULES:
        schedule.validate()


def test_text_says_it_all():
    for schedule in SCHEDULES:
        assert Schedule.from_text(schedule.to_text()) == schedule


def test_text_names_the_line_it_cannot_read():
    text = all_gather_matmul_schedule([1, 1]).to_text().replace("wait 0", "wait for it", 1)
    with pytest.raises(ValueError, match=r"line \d+: expected a buffer .* got '  wait for it'"):
        Schedule.from_text(text)


# ---- time


RATIOS = [(1.0, 0.25), (1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (1.0, 4.0)]  # t_c, t_x


@pytest.mark.parametrize("make", [all_gather_matmul_schedule, matmul_reduce_scatter_schedule])
def test_makespan_is_the_closed_form(make):
    for world, (t_c, t_x) in itertools.product((1, 2, 3, 4, 8), RATIOS):
        costs = {"per_cost": t_c, "per_message": 0.0, "per_size": t_x}
        overlapped = make([1] * world).makespan(**costs)
        assert overlapped == pytest.approx(t_c + (world - 1) * max(t_c, t_x), abs=1e-9)
        serial = make([1] * world, overlap=False).makespan(**costs)
        assert serial == pytest.approx(world * t_c + (world - 1) * t_x, abs=1e-9)


@pytest.mark.parametrize(("t_c", "t_x", "alpha"), [(1, 2, 0.01), (1, 1, 0.02), (2, 1, 0.001)])
def test_makespan_of_chunks_is_the_closed_form(t_c, t_x, alpha):
    """Two ranks, s chunks: the link is never idle, and what is left after it is the product of one chunk."""
    for s in (1, 2, 4, 10, 64):
        got = all_gather_matmul_schedule([s, s], chunks=s).makespan(
            per_cost=t_c / s, per_message=alpha, per_size=t_x / s
        )
        linked = s * alpha + t_x + t_c / s
        if linked >= 2 * t_c:
            assert got == pytest.approx(linked, abs=1e-9)
        else:  # bound by the products, but for the first message
            assert 2 * t_c - 1e-9 <= got <= max(2 * t_c, linked) + t_x / s + alpha


@pytest.mark.parametrize("reduce", ["ordered", "ring"])
@pytest.mark.parametrize(("t_c", "t_x", "alpha"), [(1, 2, 0.01), (1, 3, 0.02)])
def test_makespan_of_summed_chunks_is_the_closed_form(reduce, t_c, t_x, alpha):
    """Two ranks, s chunks, the link as the bound: it carries all but the first product without a pause."""
    for s in (1, 2, 4, 10, 64) if reduce == "ordered" else (1, 2):
        costs = {"per_cost": t_c / s, "per_message": alpha, "per_size": t_x / s}
        scattered = matmul_reduce_scatter_schedule([1, 1], columns=s, chunks=s, reduce=reduce)
        linked = t_c / s + s * alpha + t_x
        assert scattered.makespan(**costs) == pytest.approx(linked, abs=1e-9)
        whole = matmul_all_reduce_schedule([1, 1], rows=s, reduce=reduce)
        arrives = t_c + alpha + t_x  # the other's product; then the sum goes back
        assert whole.makespan(**costs) == pytest.approx(arrives + alpha + t_x, abs=1e-9)


@pytest.mark.parametrize(
    "make", [all_gather_matmul_schedule, matmul_reduce_scatter_schedule, matmul_all_reduce_schedule]
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [1, -2]}, "sizes: expected at least 0, got -2"),
        ({"chunks": 0}, "chunks: expected at least 1, got 0"),
        ({"reduce": "tree"}, "reduce: expected 'ordered' or 'ring', got 'tree'"),
    ],
)
def test_wrong_arguments_are_named(make, options, message):
    if make is all_gather_matmul_schedule and "reduce" in options:
        pytest.skip("nothing is reduced")
    with pytest.raises(ValueError, match=f"{make.__name__}: {message}"):
        make(**{"sizes": [1, 2], **options})


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_of_many_chunks_is_the_closed_form(world):
    """The link has no pause between one pair of chunks and the next."""
    for s, (t_c, t_x) in itertools.product((2, 3, 8), RATIOS):
        schedule = matmul_reduce_scatter_schedule([1] * world, columns=s, chunks=s, reduce="ring")
        got = schedule.makespan(per_cost=t_c / s, per_message=0.0, per_size=t_x / s)
        least = max(world * t_c, t_c / s + (world - 1) * t_x)
        assert got == pytest.approx(least, abs=1e-9)


def test_makespan_of_panels_is_the_closed_form():
    """s panels: either the products follow each other after the first panel, or the panels before the last product."""
    for world, s, (t_c, t_x) in itertools.product((2, 3, 4), (1, 2, 8), RATIOS):
        schedule = all_gather_panels_schedule([1] * world, columns=s, chunks=s)
        got = schedule.makespan(per_cost=t_c / s, per_message=0.0, per_size=t_x / s)
        products, messages = world * t_c, (world - 1) * t_x
        expected = max(messages / s + products, messages + products / s)
        assert got == pytest.approx(expected, abs=1e-9)


def test_overlap_never_takes_longer():
    """But for a message: with uneven shards another order may suit the links better."""
    for sizes, costs in itertools.product(SIZES, [(1.0, 0.1, 2.0), (3.0, 0.0, 1.0)]):
        named = dict(zip(("per_cost", "per_message", "per_size"), costs))
        for make in (
            all_gather_matmul_schedule,
            matmul_reduce_scatter_schedule,
            *reducing("ordered"),
            *reducing("ring"),
        ):
            serial = make(sizes, overlap=False).makespan(**named)
            assert make(sizes).makespan(**named) <= serial + costs[1] + 1e-9


# ---- mutations


def with_actions(schedule, rank, actions):
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def without_one(schedule):
    """Any action left out."""
    for rank, actions in enumerate(schedule.ranks):
        for i in range(len(actions)):
            yield with_actions(schedule, rank, actions[:i] + actions[i + 1 :])


def swapped_payloads(schedule):
    """Two messages that a rank sends or receives one soon after the other, exchanged: their peers stay."""
    for (rank, actions), kind in itertools.product(enumerate(schedule.ranks), ("send", "recv")):
        places = [i for i, a in enumerate(actions) if a.kind == kind]
        for i, j in ((i, j) for n, i in enumerate(places) for j in places[n + 1 : n + 4]):
            a, b = actions[i], actions[j]
            if (a.reads, a.writes, a.content) == (b.reads, b.writes, b.content):
                continue  # the same shard to two peers: exchanging them changes nothing
            mutant = list(actions)
            mutant[i] = dataclasses.replace(b, peer=a.peer, tag=a.tag)
            mutant[j] = dataclasses.replace(a, peer=b.peer, tag=b.tag)
            yield with_actions(schedule, rank, mutant)


def shrunk_buffers(schedule):
    """A buffer one smaller than the largest thing that it holds."""
    for rank, actions in enumerate(schedule.ranks):
        used = {}
        for a in actions:
            for name in (a.writes, *(a.reads if a.kind == "send" else ())):
                used[name] = max(used.get(name, 0), a.size)
        for name, size in used.items():
            if name and size:
                buffers = list(schedule.buffers)
                buffers[rank] = {**buffers[rank], name: size - 1}
                yield dataclasses.replace(schedule, buffers=tuple(buffers))


def late_and_early_waits(schedule):
    """A wait after the compute that follows it, where that reads what arrived."""
    for rank, actions in enumerate(schedule.ranks):
        for i, (a, b) in enumerate(itertools.pairwise(actions)):
            arrives = {x.writes for x in actions if x.kind == "recv" and x.tag == a.tag}
            if a.kind == "wait" and b.kind == "compute" and arrives & set(b.reads):
                yield with_actions(schedule, rank, [*actions[:i], b, a, *actions[i + 2 :]])


def other_ends(schedule):
    """A message to another peer, under another tag, of another size."""
    for rank, actions in enumerate(schedule.ranks):
        for i, a in enumerate(actions):
            if a.kind in ("send", "recv"):
                others = (
                    {"peer": (a.peer + 1) % schedule.world},
                    {"tag": a.tag + 99},
                    {"size": a.size - 1},
                )
                for change in others:
                    if change != {"peer": a.peer}:
                        mutant = [*actions[:i], dataclasses.replace(a, **change), *actions[i + 1 :]]
                        yield with_actions(schedule, rank, mutant)


def one_buffer(schedule):
    """One receive buffer where two are needed: the next message would fall on what is still read."""
    for rank, actions in enumerate(schedule.ranks):
        names = {a.writes for a in actions if a.kind == "recv"}
        if schedule.name == "all_gather_matmul" and len(names) == 2:
            swap = [
                dataclasses.replace(
                    a,
                    writes="in0" if a.writes == "in1" else a.writes,
                    reads=tuple("in0" if r == "in1" else r for r in a.reads),
                )
                for a in actions
            ]
            if swap != list(actions) and schedule_overlaps(actions):
                yield with_actions(schedule, rank, swap)


def schedule_overlaps(actions):
    """Whether two receives are ever under way at once."""
    flying, most = set(), 0
    for a in actions:
        flying |= {a.tag} if a.kind == "recv" else set()
        flying -= {a.tag} if a.kind == "wait" else set()
        most = max(most, len(flying))
    return most > 1


MUTATIONS = [
    without_one, swapped_payloads, shrunk_buffers, late_and_early_waits, other_ends, one_buffer,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_every_mutation_is_caught(mutate):
    caught, missed = 0, []
    for schedule in SCHEDULES:
        for mutant in mutate(schedule):
            try:
                mutant.validate()
                missed.append(mutant.to_text())
            except ScheduleError:
                caught += 1
    assert not missed, f"{len(missed)} of {caught + len(missed)} missed, the first:\n{missed[0]}"
    assert caught >= 10


def test_deadlock_that_buffering_hides():
    """Two ranks that wait for their sends before they receive: it runs on Gloo, and hangs on NCCL."""

    def rank(me):  # its own message under tag `me`
        other = 1 - me
        return (
            Action("send", me, other, reads=("x",), content=f"x{me}", size=1),
            Action("wait", me),
            Action("recv", other, other, writes="y", content=f"x{other}", size=1),
            Action("wait", other),
        )

    ranks = (rank(0), rank(1))
    schedule = Schedule(
        "pair", ranks, ({"x": 1, "y": 1},) * 2, ({"x": "x0"}, {"x": "x1"}), (frozenset(),) * 2
    )
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at wait 0; rank 1 at wait 1"):
        schedule.validate()
