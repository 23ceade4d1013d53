"""Replicas that hold the same bits agree, and one flipped bit is named: parameter, rank, first index, both values.

1. Over gloo, four ranks: agreement costs 25 bytes a rank; a flip of any bit of any dtype is named on every rank alike.
2. What cannot be compared is named or refused, and the ranks stay in step.
3. In one process, copies of any shapes: every flip is found where bits.first_difference finds it, and it alone.
4. One flipped bit among 100 million parameters.
"""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit import ArgumentError, bits
from isobit.guards import rank_agreement
from isobit.guards.live.comparison import ParameterDifference, compare_copies, is_finite
from isobit.library.rank_agreement import flip_bit
from tests.guards.gloo_ranks import FLIPS, RANKS, ROOT, found_by_ranks

# ---- 1. on four ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    return found_by_ranks()


def on_all(ranks, check):
    """What every rank found alike."""
    assert all(found[check] == ranks[0][check] for found in ranks)
    return ranks[0][check]


def test_agreement(ranks):
    for rank, found in enumerate(ranks):
        found = found["agreements"]
        assert found["agreed"] == [True] * 3
        assert found["changed"] == [None, False, True]
        assert found["kept"] == [True, False, True, False]
        assert "0.bias" not in found["unchanged"]
        assert len(found["unchanged"]) == 5
        assert found["counts"] == [list(range(RANKS)), 6, 290, 25]
        assert found["finite"] == [True, False]
        assert found["nonfinite"] == (["0.bias"] if rank == 2 else [])
        assert found["skipped"]


def test_every_flip_is_named(ranks):
    found = on_all(ranks, "flips")
    assert [[(d["parameter"], d["rank"], tuple(d["index"])) for d in one] for one in found] == [
        [flip[:3]] for flip in FLIPS
    ]
    assert (found[1][0]["there"], found[1][0]["expected"]) == ("0x80000000", "0x00000000")
    assert (found[2][0]["there"], found[2][0]["expected"]) == ("0x7fc0000c", "0x7fc00000")
    assert (found[3][0]["there"], found[3][0]["expected"]) == ("0xbf80", "0x3f80")


def test_the_minority_is_named_whoever_it_is(ranks):
    found = on_all(ranks, "flips")
    for flip, (one,) in zip(FLIPS, found, strict=True):
        assert one["majority"] == [rank for rank in range(RANKS) if rank != flip[1]]
        assert not one["tied"]


def test_without_a_majority_the_groups_are_listed(ranks):
    found = on_all(ranks, "tied")
    assert [(d["rank"], d["majority"], d["tied"]) for d in found["found"]] == [
        (2, [0, 1], True),
        (3, [0, 1], True),
    ]
    assert found["minority"] == []
    assert "rank 2, 0.weight, bits at [3, 4]" in found["said"]
    assert "as ranks 0, 1, and no majority" in found["said"]
    assert "where there is no majority" in found["said"]
    assert [(d["rank"], d["majority"]) for d in found["each"]] == [
        (0, [1, 2, 3]),
        (1, [0, 2, 3]),
        (2, [0, 1, 3]),
    ]
    assert found["all"] == [0, 1, 2]


def test_many_differences_are_all_named_and_some_searched(ranks):
    found = on_all(ranks, "many")
    assert len(found["found"]) == found["record"] == 10
    assert [d["index"] for d in found["found"]] == [[0, 0], [1, 1]] * 2 + [None] * 6
    assert "rank 1, view, bits at [0, 0]" in found["raised"]
    assert "and 6 more" in found["raised"]


# ---- 2. what cannot be compared ---------------------------------------------------------------------------


def test_unlike_parameters_are_named(ranks):
    found = [(d["parameter"], d["rank"], d["what"]) for d in on_all(ranks, "unlike")]
    assert found == [("a", 1, "dtype"), ("b", 2, "shape"), ("c", 1, "missing"), ("d", 2, "extra")]


def test_refusals_leave_the_ranks_in_step(ranks):
    for rank, found in enumerate(ranks):
        sparse, empty, twice, every, mode, after = found["refusals"]
        assert ("ArgumentError" in sparse) if rank == 1 else ("members [1]" in sparse)
        assert "expected a parameter" in empty
        assert "named twice" in twice
        assert every.startswith("ArgumentError")
        assert mode.startswith("ArgumentError")
        assert after == "True"


def test_shards_are_compared_with_their_replicas_alone(ranks):
    for rank, found in enumerate(ranks):
        found = found["sharded"]
        assert found["agreed"] == [True, [rank % 2, rank % 2 + 2]]
        wanted = [("w", 3, [1, 2])] if rank % 2 else []
        assert [(d["parameter"], d["rank"], d["index"]) for d in found["found"]] == wanted
        for wrong_group in ("world", "tensor parallel"):
            assert "have the same shards" in found[wrong_group]


# ---- 3. in one process -------------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


@settings(max_examples=60)
@given(st.data())
def test_flips_are_found_where_they_are(data):
    shapes = data.draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def draw(shape, dtype):
        size = torch.empty(shape, dtype=dtype).element_size()
        return (
            torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
            .view(dtype)
            .reshape(shape)
        )

    first = {
        str(i): draw(shape, dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    copies = [
        {name: t.clone() for name, t in first.items()} for _ in range(data.draw(st.integers(1, 5)))
    ]
    for copy in copies:
        for name in data.draw(st.sets(st.sampled_from(sorted(copy)))):
            for _ in range(data.draw(st.integers(1, 3))):
                place = data.draw(st.integers(0, copy[name].numel() - 1))
                flip_bit(
                    copy[name], place, data.draw(st.integers(0, 8 * copy[name].element_size() - 1))
                )
    wanted = {
        finding for name in first for finding in minority([copy[name] for copy in copies], name)
    }
    assert set(compare_copies(copies).differences) == wanted


def minority(tensors, name):
    """By comparing each pair."""
    groups = []
    for at, tensor in enumerate(tensors):
        home = next((group for group in groups if bits.equal(tensors[group[0]], tensor)), None)
        groups.append([at]) if home is None else home.append(at)
    most = max(map(len, groups))
    right = next(group for group in groups if len(group) == most)
    tied = sum(len(group) == most for group in groups) > 1
    for group in groups:
        for at in group if group is not right else ():
            found = bits.first_difference(
                bits.as_integers(tensors[at]), bits.as_integers(tensors[right[0]])
            )
            yield ParameterDifference(
                name, at, "bits", found.left, found.right, found.index, tuple(right), tied
            )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_finite(dtype):
    big = torch.finfo(dtype).max
    assert is_finite(torch.full((1000,), big, dtype=dtype))  # though their sum is not
    assert is_finite(torch.empty(0, dtype=dtype))
    for wrong in (torch.inf, -torch.inf, torch.nan):
        x = torch.full((1000,), big, dtype=dtype)
        x[777] = wrong
        assert not is_finite(x)


def test_one_rank_alone():
    found = rank_agreement({"x": torch.ones(2)})
    assert found.agreed
    assert found.ranks == (0,)
    with pytest.raises(ArgumentError):
        rank_agreement({"x": torch.ones(2, device="meta")})


# ---- 4. one in 100 million ---------------------------------------------------------------------------------


@pytest.mark.full
def test_one_bit_in_a_hundred_million():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "agreement", "--quick"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert b"found: rank 1" in done.stdout
