"""Ask z3 for integers that satisfy a list of facts, with a time limit and several strategies."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from isobit.errors import EngineError

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
