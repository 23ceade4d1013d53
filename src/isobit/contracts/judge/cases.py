"""Run a claim on fixed, drawn and shrunk cases, each with gradients enabled and disabled."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from isobit import bits
from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.compiled_code import certified
from isobit.contracts.judge.integers_search import examine_integers, search_integers
from isobit.contracts.judge.recipes import Case, Recipe, fixed_recipes
from isobit.contracts.judge.relations import RELATIONS, refuses
from isobit.contracts.judge.search import reduce, search
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.store import ladder
from isobit.errors import ContractError, EngineError, in_one_line

SECONDS_TO_SHRINK = 20.0
Progress = Callable[[str, int, int], None]  # what is being judged, how many are done, of how many

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
    contract: Contract,
    bound: Bound,
    thorough: bool,
    first_only: bool = False,
    progress: Progress = unseen,
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
        recipes = list(recipes_of(contract, claim, thorough, first_only))
        for at, recipe in enumerate(recipes):
            progress(f"{claim.id}, {recipe.words()}", at, len(recipes))
            is_small = Case(recipe, contract.inputs[recipe.inputs]).elements <= SMALL
            run = run_both if first_only or is_small else run_case
            run(contract, bound, recipe, tally, raising=first_only)
            if tally.differing and failing is None:
                failing = recipe
            if tally.differing and first_only:
                break
    return tally, failing


def recipes_of(
    contract: Contract, claim: Claim, thorough: bool, first_only: bool
) -> Iterator[Recipe]:
    """Yield the fixed recipes of a claim; for sabotage, those of its first inputs."""
    for name in claim.inputs[:1] if first_only else claim.inputs:
        yield from fixed_recipes(name, contract.inputs[name], thorough and not first_only)


def run_both(
    contract: Contract, bound: Bound, recipe: Recipe, tally: Tally, raising: bool = False
) -> None:
    """Judge one case without gradients, and also with gradients if an output is judged."""
    run_case(contract, bound, recipe, tally, raising)
    if bound.has_both_modes():
        training = Tally()
        run_case(contract, replace(bound, gradients=True), recipe, training, raising)
        training.cases = training.inputs = 0
        training.first = training.first and f"with gradients enabled: {training.first}"
        tally.add(training)


def run_case(
    contract: Contract, bound: Bound, recipe: Recipe, tally: Tally, raising: bool = False
) -> None:
    """Judge one case. A subject that raises breaks the claim; a planted one is not caught by raising."""
    case = Case(recipe, contract.inputs[recipe.inputs])
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


def find_breach(
    contract: Contract, bound: Bound, tally: Tally, seconds: float
) -> Recipe | str | None:
    """Judge L3 on many inputs, half with gradients; return the smallest counter-example, or None."""
    if bound.claim.relation == "algebra":
        return search_integers(bound, tally, ladder.ENOUGH_INPUTS)
    modes = (bound, replace(bound, gradients=True)) if bound.has_both_modes() else (bound,)

    def check(case: Case, found: Tally) -> None:
        run_case(contract, modes[case.recipe.seed % len(modes)], case.recipe, found)

    first = bound.claim.inputs[0]
    return search(check, first, contract.inputs[first], tally, seconds)


def shrink(contract: Contract, bound: Bound, failing: Recipe | None) -> Recipe | str | None:
    """Return a smaller counter-example, or the given one if none is found."""
    if bound.claim.relation in ("refuses", "algebra", "certified"):
        return search_integers(bound, Tally(), 1000) if bound.claim.relation == "algebra" else None
    if failing is None:
        return None

    def check(case: Case, found: Tally) -> None:
        run_both(contract, bound, case.recipe, found)

    return reduce(check, failing, contract.inputs[failing.inputs], SECONDS_TO_SHRINK)
