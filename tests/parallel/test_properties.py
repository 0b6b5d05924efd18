"""DataParallel and Zero on random models: a few examples in every run, many more with `make test-full`."""

import pytest

FEW = {1: (1,), 2: range(4), 3: (5, 7), 4: (10,)}
MANY = {1: range(8), 2: range(40), 3: range(40, 70), 4: range(70, 90)}
EXAMPLES = [(w, s) for w, seeds in FEW.items() for s in seeds]
SLOW = [(w, s) for w, seeds in MANY.items() for s in seeds if (w, s) not in EXAMPLES]


@pytest.mark.parametrize(
    ("world", "seed"),
    EXAMPLES + [pytest.param(*example, marks=pytest.mark.slow) for example in SLOW],
)
def test_random_models(rank_pools, world, seed):
    assert rank_pools.run(world, "property_cases", "agrees", seed=seed) == [None] * world
