"""The prover proves what is true of all integers, refutes by integers that are real, and says when it knows neither."""

import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.contracts.judge.proofs import integers
from isobit.contracts.judge.proofs.integers import prove
from isobit.errors import EngineError, UnsupportedError

ANY = (None, None)
POSITIVE = (1, None)


def assert_proved(predicate, **domain):
    found = prove(predicate, domain)
    assert (found.proved, found.counterexample, found.unknown) == (True, None, "")
    return found


def refuted(predicate, **domain):
    found = prove(predicate, domain)
    assert not found.proved
    assert found.unknown == ""
    assert not predicate(**found.counterexample)
    for name, (low, high) in domain.items():
        value = found.counterexample[name]
        assert type(value) is int
        assert low is None or value >= low
        assert high is None or value <= high
    return found


def sign(x):
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def test_every_branch_is_walked_once():
    assert assert_proved(lambda x: sign(x) * x >= 0, x=ANY).paths == 3
    assert assert_proved(lambda x: sign(x) == 1, x=POSITIVE).paths == 1
    assert refuted(lambda x: sign(x) >= 0, x=ANY).counterexample["x"] < 0
    # One question, asked twice, is one fork.
    assert assert_proved(lambda x, y: (x < y) == (not y <= x), x=ANY, y=ANY).paths == 2


def test_min_and_max():
    assert_proved(lambda a, b: min(a, b) + max(a, b) == a + b, a=ANY, b=ANY)
    assert_proved(lambda a, b, c: min(a, b, c) <= b <= max(a, b, c), a=ANY, b=ANY, c=ANY)
    refuted(lambda a, b: min(a, b) < max(a, b), a=ANY, b=ANY)


def test_arithmetic_with_plain_numbers_on_either_side():
    assert_proved(
        lambda x: 3 + x - 3 == x and 3 - (3 - x) == x and 2 * x == x * 2 and x - (-x) == 2 * x,
        x=ANY,
    )
    assert_proved(lambda x: 10 // x * x + 10 % x == 10, x=POSITIVE)


def test_floor_division_and_remainder():
    assert_proved(lambda n, d: n // d * d + n % d == n and 0 <= n % d < d, n=ANY, d=POSITIVE)
    assert_proved(lambda n: n // 2 * 2 <= n <= n // 2 * 2 + 1, n=ANY)
    assert_proved(lambda n, d: (n + d - 1) // d * d >= n, n=ANY, d=POSITIVE)
    refuted(lambda n, d: n // d * d == n, n=ANY, d=POSITIVE)
    # Python rounds to minus infinity, not to zero.
    assert_proved(lambda n: n // 2 < 0, n=(None, -1))


@settings(max_examples=25)
@given(n=st.integers(-30, 30), d=st.integers(1, 9))
def test_symbols_divide_as_python_does(n, d):
    """A domain of one point leaves z3 nothing to choose."""
    found = prove(lambda x: x // d == n // d and x % d == n % d, {"x": (n, n)})
    assert found.proved


def test_division_by_what_may_be_zero_or_negative_is_refused():
    for low in (0, -1, None):
        with pytest.raises(UnsupportedError, match="compare the divisor with zero"):
            prove(lambda n, d: n // d <= n, {"n": POSITIVE, "d": (low, None)})
    with pytest.raises(UnsupportedError, match="divisor"):
        prove(lambda n: n % -3 <= 0, {"n": ANY})
    assert_proved(lambda n, d: d < 1 or n // d <= n, n=POSITIVE, d=ANY)


def test_a_refusal_that_is_caught_is_still_a_refusal():
    def swallows(n, d):
        try:
            return n // d <= n
        except Exception:
            return True

    with pytest.raises(UnsupportedError, match="divisor"):
        prove(swallows, {"n": POSITIVE, "d": ANY})


@pytest.mark.parametrize(
    "use",
    [
        int,
        float,
        hash,
        range,
        lambda x: [0][x],
        lambda x: {x: 1},
        lambda x: x == 1.0,
        lambda x: x * 0.5,
    ],
    ids=["int", "float", "hash", "range", "index", "key", "equals a float", "times a float"],
)
def test_symbols_are_not_numbers(use):
    with pytest.raises(UnsupportedError, match="whole-number arithmetic"):
        prove(lambda x: use(x) is not None, {"x": ANY})
    with pytest.raises(UnsupportedError, match="whole-number arithmetic"):
        prove(lambda x: hash(x > 0) == 0, {"x": ANY})


def test_truth_compares_by_value():
    assert_proved(lambda x: ((x > 0) == True) == (not x <= 0), x=ANY)  # noqa: E712
    assert_proved(lambda x: ((x > 0) != True) == (x <= 0), x=ANY)  # noqa: E712


def test_a_loop_without_end_is_stopped():
    def counts_down(x):
        while x > 0:
            x = x - 1
        return x <= 0

    def never_asks(x):
        while True:
            x = x + 1

    found = prove(counts_down, {"x": ANY}, max_paths=20)
    assert (found.proved, found.counterexample, found.unknown) == (False, None, "too many paths")
    assert prove(counts_down, {"x": (None, 10)}, max_paths=20).proved
    began = time.monotonic()
    found = prove(never_asks, {"x": ANY}, seconds=0.3)
    assert (found.proved, found.counterexample, found.unknown) == (False, None, "out of time")
    assert time.monotonic() - began < 10


def test_exactly_as_many_paths_as_are_allowed():
    assert prove(lambda x: sign(x) * x >= 0, {"x": ANY}, max_paths=3).proved
    assert prove(lambda x: sign(x) * x >= 0, {"x": ANY}, max_paths=2).unknown == "too many paths"


def no_cube_is_two(a, b, c):
    return a * a * a + b * b * b != c * c * c


def no_cube_is_two_by_a_branch(a, b, c):
    return not bool(a * a * a + b * b * b == c * c * c)


@pytest.mark.parametrize("predicate", [no_cube_is_two, no_cube_is_two_by_a_branch])
@pytest.mark.sweep(1)
def test_unknown_is_no_proof(predicate):
    """No two cubes add up to a cube: true, and beyond the solver; also where it decides whether a branch is entered."""
    found = prove(predicate, dict.fromkeys("abc", POSITIVE), seconds=3.0)
    assert not found.proved
    assert found.counterexample is None
    assert found.unknown


def test_a_proof_about_nothing_is_no_proof():
    found = prove(lambda x: x > x, {"x": (1, 0)})
    assert not found.proved
    assert found.unknown == "no integers were found in the domain"


def test_what_tells_symbols_from_numbers_is_not_believed():
    """A predicate that is true of symbols only, and one that is false of symbols only."""
    for wrong in (lambda x: not isinstance(x, int), lambda x: isinstance(x, int)):
        found = prove(wrong, {"x": ANY})
        assert not found.proved
        assert found.counterexample is None
        assert found.unknown.startswith("model mismatch")


def test_a_predicate_must_ask_the_same_each_time():
    asked = []

    def fickle(x):
        asked.append(x)
        return bool(x > len(asked)) or True

    with pytest.raises(UnsupportedError, match="depend on its arguments"):
        prove(fickle, {"x": ANY})

    def tires(x):
        asked.append(x)
        return True if len(asked) > 1 else bool(x > 0)

    asked.clear()
    assert (
        prove(tires, {"x": (0, None)}).unknown
        == "the predicate made other comparisons when it was run again"
    )


def test_without_z3_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "z3", None)
    with pytest.raises(EngineError, match="pip install z3-solver"):
        prove(lambda x: x == x, {"x": ANY})


def test_the_same_answer_twice():
    """Each proof has a context of its own: what was asked before does not lead z3 elsewhere."""
    first = refuted(lambda a, b: a * b != 12 * b + a, a=POSITIVE, b=POSITIVE)
    assert prove(lambda a, b: a + b >= a, {"a": ANY, "b": ANY}).counterexample
    assert refuted(lambda a, b: a * b != 12 * b + a, a=POSITIVE, b=POSITIVE) == first


@settings(max_examples=30)
@given(
    terms=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(-4, 4)),
        min_size=1,
        max_size=3,
    ),
    divisor=st.integers(1, 4),
)
def test_the_prover_agrees_with_brute_force(terms, divisor):
    def predicate(x, y):
        return any((a * x + b * y) // divisor > c or (x * y) % divisor == a for a, b, c in terms)

    box = range(-3, 4)
    true = all(predicate(x, y) for x in box for y in box)
    found = integers.prove(predicate, {"x": (-3, 3), "y": (-3, 3)})
    assert found.unknown == ""
    assert found.proved == true
    assert true or not predicate(**found.counterexample)
