"""Run a claim on fixed, drawn and shrunk cases, each with gradients enabled and disabled."""

from __future__ import annotations

import json
import random
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isobit import bits
from isobit.contracts.judge.bound import Bound, bind
from isobit.contracts.judge.recipes import Case, Recipe, edged, fixed_recipes
from isobit.contracts.judge.relations import RELATIONS, certified, refuses
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import TRANSFORMS
from isobit.contracts.language.contract import Claim, Contract, Inputs
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.contracts.store.ladder import ENOUGH_INPUTS
from isobit.contracts.store.sources import is_interpreted
from isobit.contracts.store.tree import library
from isobit.errors import ContractError, EngineError, in_one_line

# Search many inputs for a counter-example: Hypothesis draws recipes, and each expands to the rows of a call.

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


# Judge claims about integers on many integers, and shrink counter-examples.

FIXED = 2000
LARGEST = 10**12

Integers = dict[str, int]


def domain_of(bound: Bound) -> dict[str, tuple[int | None, int | None]]:
    """Return {name: (low, high)}; None is no limit."""

    def limit(name: str, value: Any) -> int | None:
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ContractError(
            expected=f"integers.{name}: [low, high]",
            received=repr(value),
            remedy="use null for none",
        )

    pairs = bound.claim.params["integers"]
    return {name: (limit(name, pair[0]), limit(name, pair[1])) for name, pair in pairs.items()}


def draw(bound: Bound, count: int, seed: int) -> Iterator[Integers]:
    """Draw integers of every magnitude, and corners of the domain."""
    source, domain = random.Random(seed), domain_of(bound)

    def one(low: int | None, high: int | None) -> int:
        least, most = low if low is not None else -LARGEST, high if high is not None else LARGEST
        if low is None and high is None:
            return source.choice((-1, 1, 1)) * (int(2 ** (source.random() * 40)) - 1)
        corner = source.random()
        if corner < 0.15:
            return source.choice([v for v in (least, least + 1, most) if least <= v <= most])
        span = 2 ** (source.random() * (most - least + 1).bit_length())
        return min(most, least + int(span) - 1)

    for turn in range(count):
        if "draw" in bound.claim.params and turn % 4:
            yield bound.named("draw")(source)
        else:
            yield {name: one(*pair) for name, pair in domain.items()}


def holds(bound: Bound, integers: Integers, raising: bool = False) -> bool:
    """Evaluate the predicate. An exception breaks the claim, but does not catch a planted subject."""
    try:
        return bool(bound.named("predicate")(bound.wrap(bound.subject), **integers))
    except ContractError:
        raise
    except Exception:
        if raising:
            raise
        return False


def examine_integers(bound: Bound, tally: Tally, case: str = "", raising: bool = False) -> None:
    """Judge L2: fixed draws, or the one given case."""
    given = [_parse(case)] if case else draw(bound, FIXED, 0)
    for integers in given:
        tally.count(1)
        tally.compared += 1
        if not holds(bound, integers, raising):
            tally.fail(f"false at {json.dumps(integers)}")


def search_integers(bound: Bound, tally: Tally, enough: int) -> str | None:
    """Judge L3: draw until there are enough; return the smallest counter-example, or None."""
    for integers in draw(bound, max(enough - tally.inputs, 0) + 1, 1):
        tally.count(1)
        tally.compared += 1
        if not holds(bound, integers):
            found = json.dumps(_shrink(bound, integers))
            tally.fail(f"false at {found}")
            return found
    return None


def _shrink(bound: Bound, integers: Integers) -> Integers:
    """Move each number towards its lower end while the claim stays broken."""
    domain, changed = domain_of(bound), True
    while changed:
        changed = False
        for name, value in integers.items():
            least = domain[name][0] if domain[name][0] is not None else 0
            assert least is not None
            for smaller in (least, least + (value - least) // 2, value - 1):
                if least <= smaller < value and not holds(bound, {**integers, name: smaller}):
                    integers, changed = {**integers, name: smaller}, True
                    break
    return integers


def _parse(text: str) -> Integers:
    try:
        return {str(name): int(value) for name, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ContractError(
            expected="integers as a broken claim printed them",
            received=f"{text!r}: {error}",
            remedy="copy it whole",
        ) from None


SECONDS_TO_SHRINK = 20.0
Progress = Callable[[str, int, int], None]  # what is being judged, how many are done, of how many

# Relations whose outputs are judged in both modes, with gradients and without.
OUTPUTS = ("invariant", "accurate", "parity", "bound", "sums_to", "monotone", "roundtrip")
# Elements of the arguments up to which a fixed case is judged with and without gradients; L3 draws larger ones too.
SMALL = 2**16
# Messages of Triton, and of torch on CUDA, HIP and XPU, if there is no device or no driver.
NO_DEVICE = re.compile(
    r"0 active drivers|no nvidia driver|not compiled with cuda|no (cuda|hip|xpu) gpus?|accelerator device when none",
    re.IGNORECASE,
)


class NoDeviceError(EngineError):
    """The subject needs a device that this machine does not have."""


def unseen(stage: str, done: int, total: int) -> None:
    """Show no progress."""


def examine(
    bound: Bound, first_only: bool = False, progress: Progress = unseen
) -> tuple[Tally, Recipe | None]:
    """Judge L2 on the fixed inputs of a claim; return the counts and the first failing recipe."""
    tally, failing, claim = Tally(), None, bound.claim
    if claim.relation == "refuses":
        refuses(bound, tally, raising=first_only)
    elif claim.relation == "certified":
        certified(bound, tally)
    elif claim.relation == "algebra":
        examine_integers(bound, tally, raising=first_only)
    else:
        recipes = list(recipes_of(bound, first_only))
        for at, recipe in enumerate(recipes):
            progress(f"{claim.id}, {recipe.words()}", at, len(recipes))
            is_small = bound.case(recipe).elements <= SMALL
            run = run_both if first_only or is_small else run_case
            run(bound, recipe, tally, raising=first_only)
            if tally.differing and failing is None:
                failing = recipe
            if tally.differing and first_only:
                break
    return tally, failing


def recipes_of(bound: Bound, first_only: bool) -> Iterator[Recipe]:
    """Yield the fixed recipes of a claim; for sabotage, those of its first inputs."""
    names, thorough = bound.claim.inputs, bound.options.thorough
    for name in names[:1] if first_only else names:
        yield from fixed_recipes(name, bound.contract.inputs[name], thorough and not first_only)


def run_both(bound: Bound, recipe: Recipe, tally: Tally, raising: bool = False) -> None:
    """Judge one case without gradients, and also with gradients if an output is judged."""
    run_case(bound, recipe, tally, raising)
    if has_both_modes(bound.claim):
        training = Tally()
        run_case(replace(bound, gradients=True), recipe, training, raising)
        training.cases = training.inputs = 0
        training.first = training.first and f"with gradients enabled: {training.first}"
        tally.add(training)


def has_both_modes(claim: Claim) -> bool:
    """Return whether a claim is about an output, by relations that call the subject themselves.

    Gradients are judged with gradients enabled anyway; a contract's own predicates and transforms call as they do.
    """
    if claim.relation not in OUTPUTS or claim.params.get("of", "output") != "output":
        return False
    return claim.relation != "invariant" or any(n in TRANSFORMS for n in claim.params["under"])


def run_case(bound: Bound, recipe: Recipe, tally: Tally, raising: bool = False) -> None:
    """Judge one case. A subject that raises breaks the claim; a planted one is not caught by raising."""
    case = bound.case(recipe)
    counted, before = tally.cases, {name: t.clone() for name, t in case.arguments.items()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # edges overflow on purpose
            RELATIONS[bound.claim.relation](bound, case, tally)
        if tally.cases == counted:  # a predicate may count by itself
            tally.count(case.rows if bound.claim.relation != "holds" else 1)
        if not all(bits.equal(t, before[name]) for name, t in case.arguments.items()):
            tally.fail("the subject writes to its inputs, so that nothing can be compared")
    except (ContractError, EngineError):
        raise
    except (Exception, SystemExit) as error:
        check_device(error)
        if raising:
            raise
        tally.count(1)
        tally.compared += 1
        tally.fail(f"raised {type(error).__name__}: {in_one_line(error)[:300]}")


def check_device(error: BaseException) -> None:
    """Raise NoDeviceError if an error is about a missing device and there is none."""
    if NO_DEVICE.search(in_one_line(error)) and not torch.accelerator.is_available():
        raise NoDeviceError(
            expected="a device that the subject runs on",
            received=in_one_line(error)[:200],
            remedy="verify where there is one; isobit check runs Triton kernels without a GPU, and for Triton's "
            "interpreter set TRITON_INTERPRET=1",
        ) from None


def find_breach(bound: Bound, tally: Tally) -> Recipe | str | None:
    """Judge L3 on many inputs, half with gradients; return the smallest counter-example, or None."""
    if bound.claim.relation == "algebra":
        return search_integers(bound, tally, ladder.ENOUGH_INPUTS)
    modes = (bound, replace(bound, gradients=True)) if has_both_modes(bound.claim) else (bound,)

    def check(case: Case, found: Tally) -> None:
        run_case(modes[case.recipe.seed % len(modes)], case.recipe, found)

    first = bound.claim.inputs[0]
    inputs, seconds = bound.contract.inputs[first], bound.options.claim_seconds
    return search(check, first, inputs, tally, seconds)


def shrink(bound: Bound, failing: Recipe | None) -> Recipe | str | None:
    """Return a smaller counter-example, or the given one if none is found."""
    if bound.claim.relation in ("refuses", "algebra", "certified"):
        return search_integers(bound, Tally(), 1000) if bound.claim.relation == "algebra" else None
    if failing is None:
        return None

    def check(case: Case, found: Tally) -> None:
        run_both(bound, case.recipe, found)

    return reduce(check, failing, bound.contract.inputs[failing.inputs], SECONDS_TO_SHRINK)


# Judge one counter-example again, and write the command that does so.


def replay(contract: Contract, claim: Claim, options: Options, recipe: str) -> Tally:
    """Judge one case, or all fixed cases if `recipe` is empty."""
    bound, tally = bind(contract, claim, options), Tally()
    if not recipe or claim.relation in ("refuses", "certified"):
        return examine(bound)[0]
    if claim.relation == "algebra":
        examine_integers(bound, tally, recipe)
    else:
        run_both(bound, Recipe.parse(recipe, contract.inputs), tally)
    return tally


def failure_fields(bound: Bound, tally: Tally, smallest: Recipe | str | None) -> dict[str, Any]:
    """Return `detail` and `replay` of a broken claim's record, for its smallest counter-example.

    A search does not count the case that it fails on: if `tally` has no difference yet, that case is
    added to it.
    """
    detail = tally.first
    if isinstance(smallest, Recipe):
        again = Tally()
        run_both(bound, smallest, again)
        detail = again.first or detail
        if not tally.differing:
            tally.add(again)
    elif smallest:
        detail = smallest
    return {"detail": detail, "replay": replay_command(bound, smallest)}


def replay_command(bound: Bound, case: Recipe | str | None) -> str:
    """Return the shell command that judges a case of a claim again."""
    contract, options = bound.contract, bound.options
    words = ["TRITON_INTERPRET=1"] if is_interpreted() else []
    words += ["isobit", "contract", "replay", f"{contract.id}/{bound.claim.id}"]
    if case:
        words += ["--case", f"'{case}'"]
    if options.subject:
        words += ["--subject", shlex.quote(options.subject)]
    for package in options.trusted:
        words += ["--trust", package]
    if contract.path and library() not in Path(contract.path).resolve().parents:
        words += ["--file", contract.path]
    return " ".join(words)
