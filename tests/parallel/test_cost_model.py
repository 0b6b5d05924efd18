"""The choice between plain and overlapped, from numbers alone."""

import functools

import pytest
import torch
from trainwright.parallel import (
    CostModel,
    all_gather_matmul_schedule,
    cost_model,
    matmul_all_reduce_schedule,
    matmul_reduce_scatter_schedule,
)

CPU = torch.device("cpu")
# α, B, P, hidden: of cluster links, and of a loopback device, where the network takes the products' cores
LINKS = {
    "NVLink H100": CostModel(5e-6, 400e9, 650e12, 1.0),
    "100 GbE CPU": CostModel(3e-5, 12e9, 2e12, 1.0),
    "1 GbE CPU": CostModel(1e-4, 0.12e9, 1e11, 1.0),
    "loopback": CostModel(1e-4, 1e9, 1e11, 0.0),
}


@pytest.fixture(autouse=True)
def forget():
    before = dict(cost_model._decided)
    cost_model._decided.clear()
    yield
    cost_model._decided.clear()
    cost_model._decided.update(before)


def build(make, sizes, **options):
    return lambda chunks, overlap: make(sizes, chunks=chunks, overlap=overlap, **options)


def gather(world, rows, k, n):
    return build(all_gather_matmul_schedule, [rows] * world, row_bytes=2 * k, row_cost=2.0 * k * n)


def scatter(world, rows, k, n):
    options = {"columns": n, "item_bytes": 4, "item_cost": 2.0 * k}
    return build(matmul_reduce_scatter_schedule, [rows] * world, **options)


def reduce_all(world, rows, k, n):
    options = {"rows": rows, "item_bytes": 4, "result_bytes": 2, "item_cost": 2.0 * k}
    return build(matmul_all_reduce_schedule, [n // world] * world, **options)


def choose(name, model, schedule, sent_bytes=1 << 24):
    return cost_model.choose(name, sent_bytes, 3, CPU, lambda: model, schedule)


@pytest.mark.parametrize("make", [gather, scatter, reduce_all])
@pytest.mark.parametrize("link", ["NVLink H100", "100 GbE CPU", "1 GbE CPU"])
def test_overlap_hides_nearly_all_that_can_be_hidden(link, make):
    """Where communication takes half as long as the products, the chosen schedule shows at most 15 % of it."""
    model = LINKS[link]
    rows, k, n = 4096, 8192, 8192
    schedule = make(4, rows, k, n)
    compute_s = CostModel(0.0, float("inf"), model.flops_per_s, 1.0).seconds(schedule(1, True))
    communication_s = model.seconds(schedule(1, False)) - compute_s
    half = model.bytes_per_s * 2 * communication_s / compute_s
    model = CostModel(model.latency_s, half, model.flops_per_s, 1.0)
    choice = choose(f"{link} {make.__name__}", model, schedule)
    decision = cost_model.decisions()[-1]
    ideal_s = max(compute_s, decision.plain_s - compute_s)
    eta = (decision.plain_s - decision.predicted_s) / (decision.plain_s - ideal_s)
    assert choice.overlap and eta >= 0.85, (str(decision), eta)


def test_plain_where_overlap_hides_nothing():
    choice = choose("gather", LINKS["loopback"], gather(4, 512, 512, 512))
    assert not choice.overlap and choice.chunks == 1


def test_plain_where_latency_is_all():
    """Few rows on a slow link: nothing to win by more messages."""
    choice = choose("few rows", LINKS["1 GbE CPU"], scatter(4, 1, 64, 64))
    assert not choice.overlap or choice.chunks == 1


def test_small_calls_are_not_measured_for():
    def never():
        raise AssertionError("measured")

    schedule = gather(2, 4, 8, 8)
    choice = cost_model.choose("small", cost_model.SMALLEST_BYTES - 1, 1, CPU, never, schedule)
    assert not choice.overlap


def test_more_chunks_cost_messages_and_repeated_work():
    """The number of chunks falls as a message, or what a chunk repeats, gets dearer."""
    schedule = gather(2, 4096, 1024, 1024)
    ranks = functools.partial(cost_model.choose, "gather", 1 << 24, 1, CPU)
    chunks = []
    for latency_s in (1e-6, 1e-3, 1e-1):
        model = CostModel(latency_s, 0.5e9, 1e12, 1.0)
        chunks.append(ranks(lambda model=model: model, schedule).chunks)
    assert chunks == sorted(chunks, reverse=True) and chunks[0] > chunks[-1], chunks
    model = CostModel(1e-6, 0.5e9, 1e12, 1.0)
    cost_model._decided.clear()
    assert ranks(lambda: model, schedule, repeated_flops=1e10).chunks < chunks[0]


def test_a_decision_says_what_it_predicted_and_what_it_took():
    choice = choose("gather", LINKS["1 GbE CPU"], gather(4, 512, 512, 512))
    choice.done()
    decision = cost_model.decisions()[-1]
    assert decision.calls == 1 and decision.actual_s is not None
    text = str(decision)
    assert "predicted" in text and "times as fast as plain" in text and "of predicted" in text


def test_the_oldest_decisions_are_forgotten():
    for i in range(cost_model.KEPT + 5):
        choose(f"call {i}", LINKS["loopback"], gather(1, 1, 1, 1), sent_bytes=0)
    assert len(cost_model.decisions()) == cost_model.KEPT
