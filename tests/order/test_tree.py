"""The tree: any cover of segments by subtrees, merged in any grouping that the counter allows, is the whole."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from isobit.order.addition import chain, digest
from isobit.order.tree import Counter, Node, find_roots, merge


def pair(a, b):
    return (a, b)


def test_merge_is_balanced():
    assert merge(list(range(8)), pair) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


@given(st.integers(0, 10), st.data())
def test_shares_merge_to_the_whole(level, data):
    total = 1 << level
    edges = sorted(data.draw(st.sets(st.integers(0, total))) | {0, total})
    counter = Counter(pair)
    for first, stop in itertools.pairwise(edges):
        share = Counter(pair)
        for segment in range(first, stop):
            share.push(Node(0, segment), segment)
        assert tuple(node for node, _ in share) == find_roots(first, stop)
        for node, value in share:
            counter.push(node, value)
        assert len(counter) <= 2 * level + 1
    assert [value for _, value in counter] == [merge(list(range(total)), pair)]


@given(st.integers(1, 1024))
def test_a_run_from_zero_holds_one_partial_a_level(stop):
    roots = find_roots(0, stop)
    assert len(roots) == stop.bit_count()
    assert len({node.level for node in roots}) == len(roots)


def test_digest_ignores_the_side_and_sees_the_order():
    assert digest(((0, 1), 2)) == digest((2, (1, 0)))
    assert digest(((0, 1), 2)) != digest((0, (1, 2)))
    assert digest((0, 1, 2)) != digest(((0, 1), 2))
    assert digest(chain(range(5000))) != digest(chain([1, 0, *range(2, 4998), 4999, 4998]))
