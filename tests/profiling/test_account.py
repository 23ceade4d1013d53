"""The parts of a window add up to it, and each nanosecond has its cause: against an oracle that looks at each one.

Wrong accountants, planted below, are told from the right one by the same drawn cases.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from isobit.profiling.account import UNRECORDED, Books, Timeline, covered, union
from isobit.profiling.api import profile
from isobit.profiling.records import Account
from isobit.profiling.trace import Step, read_traces
from tests.profiling.synthetic import CORPUS, Chrome

NAMES = ("compute", "communication", "copies", "waiting")


def right(layers, start, end):
    return Timeline(layers).parts(start, end)


def oracle(layers, start, end):
    """Look at every nanosecond."""
    found = {}
    for at in range(start, end):
        covering = (name for name, slices in layers if any(a <= at < b for a, b in slices))
        cause = next(covering, UNRECORDED)
        found[cause] = found.get(cause, 0) + 1
    return found


def subtract(intervals, taken):
    return {at for a, b in intervals for at in range(a, b)} - taken


def by_cells(layers, start, end, *, window=None):
    """A second accountant, by sets of cells, which the planted ones vary."""
    inside, taken, found = set(range(start, end)), set(), {}
    for name, slices in layers:
        cells = subtract(slices, taken) & (inside if window is None else window)
        taken |= cells
        if cells:
            found[name] = len(cells)
    rest = len(inside - taken)
    return found | ({UNRECORDED: rest} if rest else {})


def sums_durations(layers, start, end):
    """Sum of kernels as wall time: two kernels at once count twice."""
    found = {}
    for name, slices in layers:
        found[name] = sum(max(0, min(b, end) - max(a, start)) for a, b in slices)
    found[UNRECORDED] = end - start - sum(found.values())
    return {name: ns for name, ns in found.items() if ns}


def overlap_in_both(layers, start, end):
    found = {name: covered(union(slices), start, end) for name, slices in layers}
    found[UNRECORDED] = end - start - sum(found.values())
    return {name: ns for name, ns in found.items() if ns}


def last_layer_wins(layers, start, end):
    return by_cells(list(reversed(layers)), start, end)


def waiting_first(layers, start, end):
    """A host that waits for the device counted as a stall of the device."""
    return by_cells([*layers[-1:], *layers[:-1]], start, end)


def end_included(layers, start, end):
    return by_cells([(name, [(a, b + 1) for a, b in s if b > a]) for name, s in layers], start, end)


def before_the_step(layers, start, end):
    return by_cells(layers, start, end, window=set(range(-100, end)))


def after_the_step(layers, start, end):
    return by_cells(layers, start, end, window=set(range(start, 200)))


def only_whole_slices(layers, start, end):
    return by_cells(
        [(n, [(a, b) for a, b in s if start <= a and b <= end]) for n, s in layers], start, end
    )


def begun_in_the_step(layers, start, end):
    return by_cells([(n, [(a, b) for a, b in s if a >= start]) for n, s in layers], start, end)


def last_end_wins(layers, start, end):
    """Merge nested slices by the end of the later one."""
    changed = []
    for name, slices in layers:
        merged = []
        for a, b in sorted(slices):
            if b <= a:
                continue
            if merged and a <= merged[-1][1]:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        changed.append((name, merged))
    return by_cells(changed, start, end)


def in_given_order(layers, start, end):
    """Merge without sorting: a slice that starts before the last one is lost."""
    changed = []
    for name, slices in layers:
        kept, last = [], -(10**9)
        for a, b in slices:
            if a >= last:
                kept.append((a, b))
                last = a
        changed.append((name, kept))
    return by_cells(changed, start, end)


def bridges_gaps(layers, start, end):
    """Slices that are one nanosecond apart are one slice."""
    changed = []
    for name, found in layers:
        starts = {a for a, _ in found}
        changed.append((name, [(a, b + (b + 1 in starts)) for a, b in found]))
    return by_cells(changed, start, end)


def idle_is_lost(layers, start, end):
    found = by_cells(layers, start, end)
    found.pop(UNRECORDED, None)
    return found


def rounds_to_microseconds(layers, start, end):
    return by_cells([(n, [(a // 2 * 2, b // 2 * 2) for a, b in s]) for n, s in layers], start, end)


def largest_slice_only(layers, start, end):
    return by_cells(
        [(n, [max(s, key=lambda i: i[1] - i[0])] if s else []) for n, s in layers], start, end
    )


def forgets_a_layer(layers, start, end):
    return by_cells(layers[:-1], start, end) if len(layers) > 1 else by_cells(layers, start, end)


WRONG = [
    sums_durations, overlap_in_both, last_layer_wins, waiting_first, end_included, before_the_step, after_the_step,
    only_whole_slices, begun_in_the_step, last_end_wins, in_given_order, bridges_gaps, idle_is_lost,
    rounds_to_microseconds, largest_slice_only, forgets_a_layer,
]  # fmt: skip

times = st.integers(-8, 48)
slices = st.lists(st.tuples(times, times).map(lambda pair: tuple(sorted(pair))), max_size=5)
cases = st.tuples(
    st.lists(slices, min_size=1, max_size=4).map(
        lambda found: list(zip(NAMES, found, strict=False))
    ),
    st.integers(0, 20),
    st.integers(0, 24),
)


@settings(max_examples=400)
@given(cases)
def test_parts_add_up_and_are_the_oracle_s(case):
    layers, start, length = case
    found = right(layers, start, start + length)
    assert sum(found.values()) == length
    assert found == oracle(layers, start, start + length)
    middle = start + length // 3
    left, rest = right(layers, start, middle), right(layers, middle, start + length)
    assert {n: left.get(n, 0) + rest.get(n, 0) for n in {*left, *rest}} == found
    pieces = list(Timeline(layers).pieces(start, start + length))
    assert [piece[0] for piece in pieces[1:]] == [piece[1] for piece in pieces[:-1]]


def drawn(seed):
    draw = random.Random(seed)
    layers = [
        (
            name,
            [
                tuple(sorted((draw.randint(-8, 48), draw.randint(-8, 48))))
                for _ in range(draw.randint(0, 4))
            ],
        )
        for name in NAMES[: draw.randint(1, 4)]
    ]
    start = draw.randint(0, 20)
    return layers, start, start + draw.randint(0, 24)


def test_ten_thousand_drawn_cases():
    cases = [drawn(seed) for seed in range(10_000)]
    assert sum(right(*case) != oracle(*case) for case in cases) == 0
    assert sum(by_cells(*case) != oracle(*case) for case in cases[:500]) == 0


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_planted_accountants_are_caught(wrong):
    caught = sum(wrong(*case) != oracle(*case) for case in map(drawn, range(300)))
    assert caught > 0


def test_an_account_that_does_not_add_up_cannot_be_made():
    with pytest.raises(ArithmeticError, match="9 of 10 ns"):
        Account(0, "step", 0, 10, {"compute": 9})
    with pytest.raises(ArithmeticError):
        Account(0, "step", 0, 10, {"compute": 11, "idle: data loader": -1})


def test_steps_tile_the_recording_and_the_last_ends_with_its_work(tmp_path):
    chrome = Chrome()
    chrome.step(4, 0, 100)
    chrome.step(5, 110, 200)
    chrome.step(9, 400, 500)  # the schedule repeats: nothing was recorded between
    chrome.kernel("k", 195, 260, launched=190)
    chrome.kernel("k", 495, 560, launched=490)
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    windows = [(step.start, step.total) for step in rank.steps]
    assert windows == [(0, 110_000), (110_000, 150_000), (400_000, 160_000)]
    assert rank.whole.total == 420_000
    assert rank.whole.parts["compute"] == 130_000
    assert rank.outside == 0


def test_work_from_before_the_trace_is_not_the_step_s(tmp_path):
    chrome = Chrome()
    chrome.step(1, 0, 100)
    chrome.add("kernel", "old", 0, 40, pid=0, tid=7, device=0, stream=7, correlation=999)
    chrome.kernel("new", 50, 70)
    chrome.add("kernel", "of a graph", 70, 80, pid=0, tid=7, device=0, stream=7)
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    assert rank.whole.parts["work from before the trace"] == 40_000
    assert rank.whole.parts["compute"] == 30_000


def test_a_slow_loader_of_another_thread_is_no_reason(tmp_path):
    """A worker that pins memory is not what the device waits for, unless the launching thread does."""
    chrome = Chrome()
    chrome.step(1, 0, 100)
    chrome.add("user_annotation", "enumerate(DataLoader)#pin", 0, 100, tid=99)
    chrome.kernel("k", 50, 60)
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    assert "idle: data loader" not in rank.whole.parts


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_device_time_of_public_traces_closes_from_first_to_last_slice():
    for trace in read_traces([CORPUS / "dlrm_8xV100.tar.gz"]):
        books = Books(trace)
        first, last = trace.device[0].start, max(event.end for event in trace.device)
        account = books.account(Step("device", first, last))
        busy = union((event.start, event.end) for event in trace.device)
        assert account.idle == last - first - sum(b - a for a, b in busy)
