"""Search many inputs for a counter-example: Hypothesis draws recipes, and each expands to the rows of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from isobit.contracts.judge.recipes import Case, Recipe, edged
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Inputs
from isobit.contracts.store.ladder import ENOUGH_INPUTS
from isobit.errors import EngineError

# Drawn by index, so that shrinking goes to one row; most draws are large, so that a call has many inputs.
ROWS = (1, 2, 3, 17, 64, 257, 1024, 1024, 1024, 1024)
EXAMPLES_A_ROUND = 12

Check = Callable[[Case, Tally], None]


class _Breach(AssertionError):
    """Raised to mark a recipe that breaks the claim."""


def search(
    check: Check,
    name: str,
    inputs: Inputs,
    tally: Tally,
    seconds: float,
    enough: int = ENOUGH_INPUTS,
) -> Recipe | None:
    """Judge drawn recipes until there are enough inputs; return the smallest that breaks the claim, or None."""
    hypothesis, recipes = _strategy(name, inputs)
    smallest: list[Recipe] = []
    started, rounds = time.monotonic(), 0
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    settings = hypothesis.settings(
        max_examples=EXAMPLES_A_ROUND,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )
    while tally.inputs < enough and not smallest and time.monotonic() - started < seconds:

        def attempt(recipe: Recipe) -> None:
            if smallest and time.monotonic() - started > seconds:
                return  # the time for shrinking is over: everything left counts as passing
            found = Tally()
            check(Case(recipe, inputs), found)
            if found.differing:
                smallest[:] = [recipe]
                raise _Breach(found.first)
            tally.add(found)

        attempt.__qualname__ = f"round {rounds}"  # a round draws by its name and seed
        with suppress(_Breach, hypothesis.errors.Flaky):
            hypothesis.seed(rounds)(settings(hypothesis.given(recipes)(attempt)))()
        rounds += 1
    return smallest[0] if smallest else None


def reduce(check: Check, recipe: Recipe, inputs: Inputs, seconds: float) -> Recipe:
    """Shrink a recipe that breaks the claim step by step, for a limited time."""
    started, changed = time.monotonic(), True

    def breaks(smaller: Recipe) -> bool:
        found = Tally()
        check(Case(smaller, inputs), found)
        return found.differing > 0

    while changed and time.monotonic() - started < seconds:
        changed = False
        for smaller in _smaller(recipe, inputs):
            if time.monotonic() - started < seconds and breaks(smaller):
                recipe, changed = smaller, True
                break
    return recipe


def _smaller(recipe: Recipe, inputs: Inputs) -> Iterator[Recipe]:
    """Yield simpler recipes: plain values, fewer rows, shorter axes, the first seed."""
    if recipe.edge not in ("", "empty", "single"):
        yield replace(recipe, edge="")
    sizes = dict(recipe.sizes)
    for name, value in recipe.sizes:
        least = min((v for v in inputs.sizes[name] if v), default=1)
        tries = [r for r in sorted(set(ROWS)) if r < value] if name == inputs.rows else []
        tries = tries or [v for v in (least, (least + value) // 2, value - 1) if least <= v < value]
        for size in tries:
            yield replace(recipe, sizes=tuple((sizes | {name: size}).items()))
    if recipe.seed:
        yield replace(recipe, seed=0)


def _strategy(inputs_name: str, inputs: Inputs) -> tuple[Any, Any]:
    try:
        import hypothesis
        from hypothesis import strategies as st
    except ImportError as error:
        raise EngineError(
            expected="Hypothesis, which draws and shrinks inputs for L3",
            received=str(error),
            remedy="pip install hypothesis z3-solver bitwuzla python-flint, or use --level L2",
        ) from None

    def size(name: str) -> Any:
        if name == inputs.rows:
            return st.integers(0, len(ROWS) - 1).map(lambda i: ROWS[i])
        values = [v for v in inputs.sizes[name] if v]
        return st.integers(min(values, default=1), max(values, default=1))

    def make(dtype: str, sizes: tuple[int, ...], edge: str, seed: int) -> Recipe:
        recipe = Recipe(
            inputs_name,
            dtype,
            tuple(zip(inputs.sizes, sizes, strict=True)),
            inputs.values,
            seed=seed,
        )
        return edged(recipe, edge, inputs) if edge else recipe

    return hypothesis, st.builds(
        make,
        st.sampled_from(inputs.dtypes),
        st.tuples(*[size(name) for name in inputs.sizes]),
        st.one_of(st.just(""), st.sampled_from(("", *(e for e in inputs.edges if e != "empty")))),
        st.integers(0, 2**16),
    )
