"""The parts of a window add up to it, and each nanosecond has its cause: against an oracle that looks at each one.

The wrong accountants of the contract profile-account-v1 are told from the right one by the same drawn cases.
"""

from inspect import isfunction

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from isobit.library.profile_account import planted
from isobit.library.profile_account.claims import NAMES, drawn, oracle
from isobit.profiling.account import Books, Timeline, parts_of, union
from isobit.profiling.api import profile
from isobit.profiling.records import Account
from isobit.profiling.trace import Step, read_traces
from tests.profiling.synthetic import CORPUS, Chrome

WRONG = [
    getattr(planted, name)
    for name, found in vars(planted).items()
    if isfunction(found)
    and found.__module__ == planted.__name__
    and name not in ("subtract", "by_cells")
]

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
    found = parts_of(layers, start, start + length)
    assert sum(found.values()) == length
    assert found == oracle(layers, start, start + length)
    middle = start + length // 3
    left, rest = parts_of(layers, start, middle), parts_of(layers, middle, start + length)
    assert {n: left.get(n, 0) + rest.get(n, 0) for n in {*left, *rest}} == found
    pieces = list(Timeline(layers).pieces(start, start + length))
    assert [piece[0] for piece in pieces[1:]] == [piece[1] for piece in pieces[:-1]]


def test_ten_thousand_drawn_cases():
    cases = [drawn(seed) for seed in range(10_000)]
    assert sum(parts_of(*case) != oracle(*case) for case in cases) == 0
    assert sum(planted.by_cells(*case) != oracle(*case) for case in cases[:500]) == 0


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_planted_accountants_are_caught(wrong):
    assert len(WRONG) == 16
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
