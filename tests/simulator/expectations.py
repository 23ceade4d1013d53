"""`expect`: a program raises an error that names its ranks, under several seeds."""

import pytest

from isobit.simulator import World

SEEDS = range(5)


def expect(error, ranks, body, count=4, match="", **options):
    for seed in SEEDS:
        with pytest.raises(error, match=f"(?s){match}") as caught:
            World(count, seed, **options).run(body)
        assert caught.value.ranks == tuple(ranks), seed
        assert caught.value.result.trace.events
    return caught.value
