"""The schedule of recursive halving: both ranks of a round agree, and the table of the note is true."""

import pytest

from isobit.parallel.collectives import transfers
from isobit.parallel.collectives.transfers import (
    Span,
    bit_reversed_spans,
    equal_spans,
    halving_rounds,
)
from isobit.parallel.collectives.tree_collectives import group_by_size


def test_the_table_of_the_note():
    rows = [line for line in transfers.__doc__.splitlines() if line[:7].strip().isdigit()]
    assert len(rows) == 8
    for rank, row in enumerate(rows):
        number, *columns, owned = (cell.strip() for cell in row.split("|"))
        rounds = halving_rounds(rank, bit_reversed_spans(8, 8))
        shown = [f"{step.peer}, keeps {name_elements(*step.kept)}" for step in rounds]
        assert (int(number), columns, owned) == (rank, shown, name_elements(*rounds[-1].kept))


def name_elements(span):
    if span.length > 2:
        return f"e{span.start}..e{span.stop - 1}"
    return " ".join(f"e{at}" for at in range(span.start, span.stop))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_what_one_gives_the_other_keeps(ranks):
    for spans in (equal_spans(1000, ranks), bit_reversed_spans(1001, ranks)):
        plans = [halving_rounds(rank, spans) for rank in range(ranks)]
        assert sorted((s.start, s.stop) for s in spans)[-1][1] in (1000, 1001)
        for rank, plan in enumerate(plans):
            for at, step in enumerate(plan):
                assert step.sent == plans[step.peer][at].kept
            assert plan[-1].kept == (spans[rank],)
    assert all(
        len(step.sent) == 1
        for rank in range(ranks)
        for step in halving_rounds(rank, bit_reversed_spans(1 << 12, ranks))
    )


def test_groups_by_size():
    assert group_by_size([3, 3, 9, 1, 1], 6) == [[0, 1], [2], [3, 4]]
    assert halving_rounds(0, (Span(0, 4),)) == []
