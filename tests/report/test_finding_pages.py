"""Pages of simulate, autopsy and twice: from records only, complete, offline, and safe against names."""

import json
import re
from html.parser import HTMLParser

import pytest

from isobit.comparing.runs.report import write_twice_page
from isobit.report.pages import MOST_RANKS, sentences_of, write_ranks
from isobit.simulator.page import write_autopsy_page, write_simulate_page

HOSTILE = "<script>alert(1)</script>\x1b[31m & \"quoted\" 'name'"
FOUND = {
    "kind": "gradients differ",
    "ranks": [1],
    "seeds": [0, 3],
    "replay": "isobit simulate train.py --ranks 4 --seed 0",
    "first": {
        "kind": "gradients differ",
        "ranks": [1],
        "text": f"expected equal gradients; received {HOSTILE}; remedy: reduce them; all of them",
        "stacks": {"1": ["train.py:7 in step", HOSTILE], "2": []},
        "note": "ranks call from different lines first in all_reduce number 2",
        "wrote": HOSTILE,
        "follows": "start differs",
    },
}
SIMULATED = {
    "script": f"train{HOSTILE}.py",
    "ranks": 4,
    "seeds": [0, 1, 2, 3],
    "clean_seeds": [1, 2],
    "findings": [FOUND],
    "not_judged": {"data alike": HOSTILE},
    "printed": [f"loss 1.5\n{HOSTILE}\n"],
    "prints_depart": "",
}
HUNG = {
    "finding": {
        "kind": "deadlock",
        "ranks": [2],
        "expected": "all ranks",
        "received": HOSTILE,
        "remedy": "look at rank 2",
        "note": HOSTILE,
        "stacks": {"0": [HOSTILE]},
    },
    "calls_in_progress": [
        {"call": "all_reduce number 7", "ranks": [0, 1], "missing": [2], "calls_differ": False},
        {"call": HOSTILE, "ranks": [0, 1], "missing": [], "calls_differ": True},
    ],
    "last_calls": {"0": {"call": HOSTILE, "state": "started", "stack": [HOSTILE]}},
    "dumps": {"0": {"calls": 7}, "1": {"calls": 7}},
    "without_dump": [2],
    "broken": {"2": HOSTILE},
    "skipped": [HOSTILE],
    "collectives": 7,
    "logs": [HOSTILE],
    "py_spy": {"2": [HOSTILE]},
}
CALL = {"operator": "aten::mm", "module": HOSTILE, "source": "", "backward": True, "number": 4}
TWICE = {
    "script": HOSTILE,
    "equal": False,
    "causes": [
        {"name": "threads", "applies": False, "shown_by": "one thread"},
        {"name": "seed not set", "applies": True, "shown_by": HOSTILE},
        {"name": "environment", "applies": None, "shown_by": ""},
    ],
    "comparison": {
        "changed": {"step": 1, "what": "gradient", "name": HOSTILE, "values": ["1.5", "1.25"]},
        "origin": {"call": CALL, "why": "random numbers", "detail": HOSTILE},
        "harmless": [{"call": CALL, "why": "a Python number", "detail": ""}],
    },
}


class Text(HTMLParser):
    """The words of a page, and the tags in it."""

    def __init__(self, page):
        super().__init__()
        self.words, self.tags = "", set()
        self.feed(page)

    def handle_data(self, data):
        self.words += data

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)


PAGES = {
    "simulate": (write_simulate_page, (SIMULATED,)),
    "autopsy": (write_autopsy_page, (HUNG,)),
    "twice": (write_twice_page, (TWICE, "DIFFER: 2 steps")),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_offline_and_escaped(name):
    write, arguments = PAGES[name]
    page = write(*json.loads(json.dumps(arguments)))
    assert "\x1b" not in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    seen = Text(page)
    assert "script" not in seen.tags
    assert "<script>alert(1)</script>" in seen.words  # as text


def test_the_page_of_a_simulation_has_what_the_terminal_has():
    words = Text(write_simulate_page(SIMULATED)).words
    for part in (
        "2 of 4 seeds clean on 4 ranks; 1 kind of findings; 1 checks not judged",
        "2 of 4 seeds, first 0; may follow from: start differs",
        "reduce them; all of them",
        "train.py:7 in step",
        "ranks call from different lines first in all_reduce number 2",
        "isobit simulate train.py --ranks 4 --seed 0",
        "data alike",
        "loss 1.5",
        "They agree over 2 clean seeds.",
    ):
        assert part in words, part
    clean = Text(write_simulate_page(SIMULATED | {"findings": [], "not_judged": {}})).words
    assert clean.count("Nothing.") == 2


def test_the_page_of_a_hang_has_what_the_terminal_has():
    words = Text(write_autopsy_page(HUNG)).words
    for part in (
        "deadlock; 2 dumps of 3 ranks, 14 calls, 7 collectives",
        "all_reduce number 7",
        "not joined by the ranks filled",
        "the calls of these ranks differ",
        "left no dump",
    ):
        assert part in words, part
    calm = HUNG | {"finding": None, "calls_in_progress": []}
    assert "no call is in progress, and all calls agree" in Text(write_autopsy_page(calm)).words


def test_the_page_of_two_runs_lists_causes_that_apply_first():
    words = Text(write_twice_page(TWICE, "DIFFER: 2 steps")).words
    assert "step 1, gradient" in words
    assert words.index("seed not set") < words.index("environment") < words.index("threads")
    same = {"changed": None, "origin": None, "harmless": []}
    equal = TWICE | {"equal": True, "causes": [], "comparison": same}
    page = write_twice_page(equal, "equal: 3 steps")
    assert 'class="verdict good">equal: 3 steps' in page
    assert "First difference" not in page
    outside = {"changed": TWICE["comparison"]["changed"], "origin": None, "harmless": []}
    page = write_twice_page(TWICE | {"comparison": outside}, "DIFFER")
    assert "memory was changed outside of torch" in page


def test_ranks_to_blame_are_filled():
    strip = write_ranks(range(4), [1], [2])
    assert re.findall(r'class="(\w*)">(\d+)', strip) == [
        ("", "0"),
        ("bad", "1"),
        ("calm", "2"),
        ("", "3"),
    ]
    assert f"+{1000 - MOST_RANKS}" in write_ranks(range(1000), [])


def test_an_error_on_one_line_is_split_at_its_own_words():
    parts = sentences_of("expected a; received b; remedy: c; received d; remedy: e")
    assert parts == {"expected": "a", "received": "b; remedy: c; received d", "remedy": "e"}
    assert sentences_of("anything") == {"found": "anything"}
