"""Prove a Python predicate for all integers by running it on symbols, along every path it can take.

A comparison of symbols returns a `Truth`. When Python evaluates its truth value, the run forks: the predicate is run
again for the other value. Along one path there are only equations and inequalities, and z3 decides whether any
integers satisfy them and make the predicate false. A counter-example counts only if the predicate is also false when
it is called with these integers.

A predicate can distinguish a symbol from a number only by `isinstance` and `is`, and must not branch on them. To
detect that, it is also called with plain integers of one witness per path.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, NoReturn

from isobit.errors import EngineError, UnsupportedError

# Ask z3 for integers that satisfy a list of facts, with a time limit and several strategies.

# Strategies: (tactic or None for z3's own choice, options, bound of all inputs or None). Products of unknowns are
# undecidable, and each strategy decides cases that others do not. A bounded one can only find inputs, not exclude them.
STRATEGIES: tuple[tuple[str | None, dict[str, Any], int | None], ...] = (
    (None, {}, None),
    ("qfnia", {}, 20),
    (None, {"smt.arith.solver": 2}, None),
    ("qfnia", {}, None),
)
# Seconds for each strategy, round by round.
ROUNDS = (0.3, 2.0, 10.0)
# The same for a fork: a branch of which z3 does not know whether it is reachable is entered.
FORK_ROUNDS = (0.2,)


class GaveUp(BaseException):
    """No answer within the limits. Not an Exception: a predicate must not catch it."""


def load_z3() -> Any:
    """Import the solver."""
    try:
        return importlib.import_module("z3")
    except ImportError as error:
        raise EngineError(
            expected="the solver z3",
            received=f"no such module ({error})",
            remedy="pip install z3-solver",
        ) from error


class Solver:
    """z3 with a deadline; several strategies are tried in turn."""

    def __init__(self, z3: Any, context: Any, inputs: Mapping[str, Any], deadline: float) -> None:
        self.z3, self.context, self.inputs, self.deadline = z3, context, inputs, deadline

    def find(self, facts: list[Any], rounds: tuple[float, ...] = ROUNDS) -> dict[str, int] | None:
        """Return inputs that satisfy the facts, or None if there are none; raise GaveUp if undecided."""
        for seconds in rounds:
            for tactic, options, bound in STRATEGIES:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise GaveUp("out of time")
                solver = self._solver(tactic)
                solver.set(timeout=max(1, int(1000 * min(seconds, left))), **options)
                solver.add(*facts)
                if bound is not None:
                    solver.add(*(term <= bound for term in self.inputs.values()))
                    solver.add(*(-bound <= term for term in self.inputs.values()))
                answer = solver.check()
                if answer == self.z3.sat:
                    return self._values(solver.model())
                if answer == self.z3.unsat and bound is None:
                    return None
        raise GaveUp("z3 has no answer")

    def possible(self, facts: list[Any]) -> bool:
        """Return False only if z3 proves within a short time limit that the facts are unsatisfiable."""
        try:
            return self.find(facts, FORK_ROUNDS) is not None
        except GaveUp:
            return True

    def witness(self, facts: list[Any]) -> dict[str, int] | None:
        """Return inputs that satisfy the facts, if z3 finds some within a short time limit."""
        try:
            return self.find(facts, FORK_ROUNDS)
        except GaveUp:
            return None

    def _solver(self, tactic: str | None) -> Any:
        z3, context = self.z3, self.context
        return (
            z3.SimpleSolver(ctx=context) if tactic is None else z3.Tactic(tactic, context).solver()
        )

    def _values(self, model: Any) -> dict[str, int]:
        return {
            name: model.eval(term, model_completion=True).as_long()
            for name, term in self.inputs.items()
        }


Decisions = list[tuple[Any, bool]]
Domain = Mapping[str, tuple[int | None, int | None]]


@dataclass(frozen=True)
class IntegerProof:
    """The result of a proof; `unknown` is why there is neither a proof nor a counter-example."""

    paths: int
    proved: bool
    counterexample: dict[str, int] | None = None
    unknown: str = ""


Combine = Callable[["Path", Any, Any], Any]


def _number(combine: Combine) -> Callable[[Integer, Any], Any]:
    def method(self: Integer, other: Any) -> Any:
        term = self._path.term_of(other)
        return (
            NotImplemented
            if term is None
            else Integer(combine(self._path, self._term, term), self._path)
        )

    return method


def _statement(compare: Combine) -> Callable[[Integer, object], Any]:
    def method(self: Integer, other: object) -> Any:
        term = self._path.term_of(other)
        return (
            NotImplemented
            if term is None
            else Truth(compare(self._path, self._term, term), self._path)
        )

    return method


class Symbol:
    """A z3 term on a path. Using it as a plain number raises."""

    def __init__(self, term: Any, path: Path) -> None:
        self._term, self._path = term, path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._term})"

    def __index__(self) -> NoReturn:
        self._path.refuse_use("an index or the count of a range")

    def __int__(self) -> NoReturn:
        self._path.refuse_use("an int")

    def __float__(self) -> NoReturn:
        self._path.refuse_use("a float")

    def __hash__(self) -> NoReturn:
        self._path.refuse_use("a key of a dict or a set")


class Integer(Symbol):
    """Any integer that the path so far allows."""

    __add__ = _number(lambda path, a, b: a + b)
    __radd__ = _number(lambda path, a, b: b + a)
    __sub__ = _number(lambda path, a, b: a - b)
    __rsub__ = _number(lambda path, a, b: b - a)
    __mul__ = _number(lambda path, a, b: a * b)
    __rmul__ = _number(lambda path, a, b: b * a)
    __floordiv__ = _number(lambda path, a, b: path.divide(a, b)[0])
    __rfloordiv__ = _number(lambda path, a, b: path.divide(b, a)[0])
    __mod__ = _number(lambda path, a, b: path.divide(a, b)[1])
    __rmod__ = _number(lambda path, a, b: path.divide(b, a)[1])
    __lt__ = _statement(lambda path, a, b: a < b)
    __le__ = _statement(lambda path, a, b: a <= b)
    __gt__ = _statement(lambda path, a, b: a > b)
    __ge__ = _statement(lambda path, a, b: a >= b)
    __eq__ = _statement(lambda path, a, b: a == b)
    __ne__ = _statement(lambda path, a, b: a != b)
    # A class that defines == loses __hash__, and with it the clear error.
    __hash__ = Symbol.__hash__

    def __neg__(self) -> Integer:
        return Integer(-self._term, self._path)

    def __bool__(self) -> bool:
        return bool(self != 0)


class Truth(Symbol):
    """A comparison of symbols; evaluating its truth value forks the run."""

    def __bool__(self) -> bool:
        return self._path.decide(self._term)

    # Without these `truth == True` would compare identities, and quietly be False.
    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __ne__(self, other: object) -> bool:
        return bool(self) != other

    __hash__ = Symbol.__hash__


class Path:
    """One run of the predicate: decisions to repeat, decisions taken, and the facts that follow from them."""

    def __init__(self, solver: Solver, domain: list[Any], prefix: Decisions, room: int) -> None:
        self.solver, self.facts, self.prefix, self.room = solver, list(domain), prefix, room
        self.taken: Decisions = []
        self.open: list[Decisions] = []
        self.quotients: list[tuple[Any, Any, Any, Any]] = []
        self.refused: UnsupportedError | None = None

    def refuse(self, expected: str, received: str, remedy: str) -> NoReturn:
        """Raise UnsupportedError, and remember it in case the predicate catches it."""
        self.refused = UnsupportedError(expected=expected, received=received, remedy=remedy)
        raise self.refused

    def refuse_use(self, use: str) -> NoReturn:
        """Raise for a symbol that is used as a plain number."""
        self.refuse(
            expected="a symbol of a proof in + - * // %, comparisons and conditions only",
            received=f"its use as {use}",
            remedy="write the function in whole-number arithmetic, or test it on samples instead",
        )

    def term_of(self, value: Any) -> Any:
        """Return an operand as a z3 term, or None if it is not an integer."""
        # Checked here because an endless loop may never evaluate a comparison, but rarely avoids arithmetic.
        if time.monotonic() > self.solver.deadline:
            raise GaveUp("out of time")
        if isinstance(value, Integer):
            return value._term
        if isinstance(value, int):
            return self.solver.z3.IntVal(int(value), self.solver.context)
        if isinstance(value, Number):
            self.refuse_use(f"a partner of {value!r}")
        return None

    def decide(self, statement: Any) -> bool:
        """Return the truth of a statement on this path; if both are possible, leave the other path open."""
        z3 = self.solver.z3
        statement = z3.simplify(statement)
        contrary = z3.simplify(z3.Not(statement))
        if z3.is_true(statement) or z3.is_false(statement):
            return bool(z3.is_true(statement))
        for fact in self.facts:
            if fact.eq(statement) or fact.eq(contrary):
                return bool(fact.eq(statement))
        if len(self.taken) < len(self.prefix):
            expected, answer = self.prefix[len(self.taken)]
            if not expected.eq(statement):
                self.refuse(
                    expected="a predicate that makes the same comparisons in each run",
                    received=f"{statement} in place of {expected}",
                    remedy="make it depend on its arguments only",
                )
        else:
            answer = self.solver.possible([*self.facts, statement])
            if answer and self.solver.possible([*self.facts, contrary]):
                self.open.append([*self.taken, (statement, False)])
                if len(self.open) > self.room:
                    raise GaveUp("too many paths")
        self.taken.append((statement, answer))
        self.facts.append(statement if answer else contrary)
        return answer

    def divide(self, dividend: Any, divisor: Any) -> tuple[Any, Any]:
        """Return quotient and remainder as unknowns: dividend = divisor × q + r with 0 ≤ r < divisor."""
        z3 = self.solver.z3
        dividend, divisor = z3.simplify(dividend), z3.simplify(divisor)
        # Reuse the quotient of the same division: z3 would have to prove that two of them are equal.
        for n, d, q, r in self.quotients:
            if n.eq(dividend) and d.eq(divisor):
                return q, r
        # On a repeated prefix, the run before has checked this.
        repeated = len(self.taken) < len(self.prefix)
        if not repeated and self.solver.find([*self.facts, divisor <= 0]) is not None:
            self.refuse(
                expected="a divisor that is positive on every path",
                received=f"division by {divisor}",
                remedy="compare the divisor with zero before dividing",
            )
        q = z3.Int(f"quotient!{len(self.quotients)}", self.solver.context)
        r = z3.Int(f"remainder!{len(self.quotients)}", self.solver.context)
        self.quotients.append((dividend, divisor, q, r))
        self.facts += [dividend == divisor * q + r, r >= 0, r < divisor]
        return q, r


def prove(
    predicate: Callable[..., Any], domain: Domain, seconds: float = 30.0, max_paths: int = 256
) -> IntegerProof:
    """Prove the predicate for all integers of the domain (low, high; None is no limit)."""
    z3 = load_z3()
    # A new context: it numbers terms, and z3's search depends on the numbers.
    context = z3.Context()
    inputs = {name: z3.Int(name, context) for name in domain}
    bounds = [inputs[name] >= low for name, (low, _) in domain.items() if low is not None]
    bounds += [inputs[name] <= high for name, (_, high) in domain.items() if high is not None]
    solver = Solver(z3, context, inputs, time.monotonic() + seconds)
    waiting: list[Decisions] = [[]]
    paths = walked = 0
    try:
        while waiting:
            path = Path(solver, bounds, waiting.pop(), max_paths - paths - len(waiting) - 1)
            outcome = predicate(**{name: Integer(term, path) for name, term in inputs.items()})
            if path.refused:
                raise path.refused
            found = _refute(path, outcome)
            paths += 1
            if len(path.taken) < len(path.prefix):
                raise GaveUp("the predicate made other comparisons when it was run again")
            if found is not None:
                return _judge(predicate, found, paths)
            witness = solver.witness(path.facts)
            walked += witness is not None
            if witness is not None and not predicate(**witness):
                return IntegerProof(
                    paths, False, unknown=f"model mismatch: the predicate is false of {witness}"
                )
            waiting += path.open
    except GaveUp as reason:
        return IntegerProof(paths, False, unknown=str(reason))
    # A proof about paths that no integers take would be vacuous.
    return IntegerProof(
        paths, walked > 0, unknown="" if walked else "no integers were found in the domain"
    )


def _refute(path: Path, outcome: Any) -> dict[str, int] | None:
    """Return inputs that take this path and make the outcome false, or None."""
    if isinstance(outcome, Truth):
        return path.solver.find([*path.facts, path.solver.z3.Not(outcome._term)])
    return None if bool(outcome) else path.solver.find(path.facts)


def _judge(predicate: Callable[..., Any], found: dict[str, int], paths: int) -> IntegerProof:
    """Check a counter-example of z3 by calling the predicate with plain integers."""
    if predicate(**found):
        return IntegerProof(
            paths, False, unknown=f"model mismatch: the predicate is true of {found}"
        )
    return IntegerProof(paths, False, found)
