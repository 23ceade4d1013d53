"""The first call of a kernel that `isobit check` judges: is it this operator at all, and can it be judged?

What prevents the call is an error (exit 2). What a caller would suffer from is a fault (exit 1): the kernel writes
to its inputs, returns their memory, has another dtype, another result for the same call, hides a NaN, or has no
gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.certifying.running.user_kernels import FAULTS, ResourcesError, Running
from isobit.contracts.judge.bound import bind, called, find_subject, named_function
from isobit.contracts.judge.recipes import LARGE_SCALE, Case, fixed_recipes
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Contract, Inputs
from isobit.contracts.options import Options
from isobit.errors import ArgumentError, IsobitError, in_one_line
from isobit.foundation.records import ClaimRecord
from isobit.library.any_kernel.kernel_run import fault_of_kernel
from isobit.library.any_kernel.signatures import LIKE
from isobit.library.any_kernel.within import UPSTREAM, Operator

# The sizes at which `isobit check` judges a kernel, and the words for them.
#
# Contracts list three kinds of inputs: small ones, which every claim is judged on, `wide` ones (a hidden size, a row
# of a vocabulary) and `many` rows. The PTX machine takes milliseconds per program, so compiled kernels get fewer
# small sizes, and the others for accuracy alone.

LARGE = ("wide", "many")
MASSIVE = "massive"  # inputs of small sizes and large values, for accuracy alone
# More than 16 rows: planted kernels change their order there. An embedding's first and last id are among few.
FEW = {"rows": (3, 18), "samples": (18,), "n": (40,), "v": (40,), "tokens": (1, 3)}
FEW_IDS = {"rows": (3, 33), "v": (5,)}
FEW_WIDE = {"rows": (2,), "samples": (1,)}

Sizes = Mapping[str, tuple[int, ...]]


def with_few_sizes(contract: Contract, like: str, quick: bool) -> Contract:
    """Return a contract with few sizes: the small ones, and unless it must be quick, large ones for accuracy."""
    small = FEW | (FEW_IDS if like == "embedding" else {})
    inputs = {}
    for name, drawn in contract.inputs.items():
        if name == "wide":
            chosen = {size: FEW_WIDE.get(size, values[:1]) for size, values in drawn.sizes.items()}
        elif name == "many":
            chosen = dict(drawn.sizes)
        else:
            chosen = {size: small.get(size, values) for size, values in drawn.sizes.items()}
        inputs[name] = replace(drawn, sizes=chosen)
    kept = {
        c.id: c.inputs if c.id == "accuracy" and not quick else first_of(c.inputs)
        for c in contract.claims
    }
    claims = tuple(replace(claim, inputs=kept[claim.id]) for claim in contract.claims)
    return only_used(replace(contract, inputs=inputs, claims=claims))


def with_given_sizes(contract: Contract, given: Sequence[tuple[str, tuple[int, ...]]]) -> Contract:
    """Return a contract that is judged at the sizes of the command line, and at no large ones of its own.

    Raises:
        ArgumentError: If the operator has no size of that name, or a name is given twice.
    """
    known = next(iter(contract.inputs.values())).sizes
    names = [name for name, _ in given]
    for name in names:
        if name not in known or names.count(name) > 1:
            raise ArgumentError(
                expected=f"each size once, of {', '.join(known)}",
                received=f"--sizes {name}" + " twice" * (names.count(name) > 1),
                remedy="for example --sizes " + list(known)[-1] + "=4096,32768",
            )
    inputs = {
        name: replace(drawn, sizes={**drawn.sizes, **dict(given)})
        for name, drawn in contract.inputs.items()
        if name not in LARGE
    }
    claims = tuple(replace(claim, inputs=first_of(claim.inputs)) for claim in contract.claims)
    return replace(contract, inputs=inputs, claims=claims)


def first_of(inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of inputs that are not large."""
    return tuple(name for name in inputs if name not in LARGE)


def only_used(contract: Contract) -> Contract:
    """Leave out inputs that no claim has."""
    used = {name for claim in contract.claims for name in claim.inputs}
    return replace(contract, inputs={n: i for n, i in contract.inputs.items() if n in used})


def sizes_in_words(contract: Contract) -> list[str]:
    """Return a line per inputs: "x [rows, n]: rows 1, 33, 130; n 7, 64, 300; float32 (all claims)"."""
    found = []
    for name, drawn in contract.inputs.items():
        claims = [claim.id for claim in contract.claims if name in claim.inputs]
        others = [claim.id for claim in contract.claims if name not in claim.inputs]
        of = {(): "all claims", ("overflow",): "all other claims"}.get(tuple(others))
        of = of or ", ".join(claims)
        found.append(f"{words_of(drawn)} ({of})")
    return found


def words_of(drawn: Inputs) -> str:
    """Return the shapes of inputs, their sizes and dtypes."""
    shapes = ", ".join(
        f"{name} [{', '.join(map(str, axes))}]" for name, axes in drawn.arguments.items()
    )
    sizes = "; ".join(
        f"{size} {', '.join(f'{value:,}' for value in values)}"
        for size, values in drawn.sizes.items()
    )
    first = next(iter(drawn.arguments))
    values = f"; |{first}| about {LARGE_SCALE}" if drawn.values == "large" else ""
    return f"{shapes}: {sizes}{values}; {', '.join(drawn.dtypes)}"


REMEDY = {
    "writes": "compute into a new tensor, or give it a copy",
    "shares": "return a tensor of its own",
    "dtype": "return the dtype of the inputs, or leave a dtype out by --dtype",
    "drawn": "leave dropout out, or call eval() of a module",
    "again": "make it a function of its arguments: no counter, no cache by address",
    "hidden": "let it pass: a NaN that is hidden is found steps later, or never",
    "leaks": "read no other row, and select by where instead of multiplying by a mask of zeros",
    "gradient": "give it a backward, or judge the output alone by --forward-only",
}


@dataclass
class Watched:
    """A kernel that keeps what it was called with, and what it returned."""

    kernel: Callable[..., Any]
    given: tuple[Any, ...] = ()
    copies: list[Any] = field(default_factory=list)

    def __call__(self, *given: Any) -> Any:
        """Call the kernel."""
        self.given = given
        self.copies = [t.detach().clone() if isinstance(t, Tensor) else t for t in given]
        return self.kernel(*given)

    def tensors(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the place of each tensor, the tensor, and its copy from before the call."""
        for at, (now, before) in enumerate(zip(self.given, self.copies, strict=True), 1):
            if isinstance(now, Tensor):
                yield at, now, before


def first_call(contract: Contract, options: Options, like: str, forward_only: bool) -> ClaimRecord:
    """Call the kernel once per dtype, and return a record of the claim `call`.

    Raises:
        ArgumentError: If it raises, or returns something else than the operator does.
    """
    kind = operator_of(contract, options)
    watched = Watched(named_function(contract, options))
    subject = called(contract, watched, options)
    record = ClaimRecord("call", "holds", "kept", 2, 2)
    for name, inputs in contract.inputs.items():
        if name in (*LARGE, MASSIVE):  # claims judge them
            continue
        for dtype in inputs.dtypes:
            recipe = list(fixed_recipes(name, replace(inputs, dtypes=(dtype,))))[-1]
            case = Case(recipe, inputs)
            try:
                found = called_once(kind, subject, case, options, like, record.compared > 0)
                with torch.no_grad():
                    fault = fault_of(kind, watched, subject, case, found)
                if not fault and not forward_only:
                    fault = fault_of_gradients(kind, watched, subject, case)
            except IsobitError as error:
                fault = fault_of_kernel(error)
                if not fault:
                    raise
            record = replace(record, compared=record.compared + 1, inputs=record.inputs + case.rows)
            if fault:
                detail = f"in {dtype}, {fault}"
                return replace(record, verdict="broken", level=1, at=2, detail=detail, differing=1)
    return record


def operator_of(contract: Contract, options: Options) -> type[Operator]:
    """Return the operator whose accuracy the contract claims."""
    claim = next(claim for claim in contract.claims if claim.id == "accuracy")
    return bind(contract, claim, replace(options, subject="")).named("predicate").__self__  # type: ignore[no-any-return]


def called_once(
    kind: type[Operator],
    subject: Callable[..., Any],
    case: Case,
    options: Options,
    like: str,
    other_dtypes: bool,
) -> Tensor:
    """Return the output of a call without gradients, which must have the operator's shape.

    `other_dtypes` tells whether it could be called with another dtype: then it may lack this one.
    """
    expected = kind.call(kind.reference, *(t.double() for t in case.arguments.values()))
    received, remedy = "", "write a function that calls the kernel in this way"
    try:
        with torch.no_grad():
            found: Tensor = subject(*copies(case))
        if not isinstance(found, Tensor):
            received = f"a {type(found).__name__} instead of a tensor"
        elif found.device.type != "cpu":
            received = f"a tensor on {found.device}"
        elif found.shape != expected.shape:
            received = f"{list(found.shape)} instead of {list(expected.shape)}"
    except IsobitError:
        raise
    except (Exception, SystemExit) as error:
        received = f"{type(error).__name__}: {in_one_line(error)[:200]}"
        if "cuda" in received.lower() and options.device == "cpu":
            remedy = (
                "let it take tensors on the CPU, or judge it where there is a GPU, by --device cuda"
            )
        else:
            remedy += ", or pass what else it needs by --with NAME=VALUE"
    if received:
        raise ArgumentError(
            expected=f"{options.subject} to be called as {LIKE[like]}",
            received=f"{received}, in {case.recipe.dtype}",
            remedy=remedy + ", or leave this dtype out by --dtype" * other_dtypes,
        )
    return found


def fault_of(
    kind: type[Operator],
    watched: Watched,
    subject: Callable[..., Any],
    case: Case,
    found: Tensor,
) -> str:
    """Return what is wrong with a call without gradients, and what to do; empty if nothing is."""
    if fault := touched(watched, found):
        return fault
    before = found.clone()
    dtypes = {case.dtype} | ({torch.float32} if kind.WIDE_OUTPUT else set())
    if found.dtype not in dtypes:
        return f"it returns {found.dtype} for {case.dtype}; {REMEDY['dtype']}"
    twice = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            twice.append(subject(*copies(case)).clone())
    if not bits.equal(*twice):
        return f"it has another result for the same arguments; {REMEDY['again']}"
    if not bits.equal(twice[0], before):
        return f"it draws random numbers; {REMEDY['drawn']}"
    return fault_of_nan(kind, subject, case)


def fault_of_nan(kind: type[Operator], subject: Callable[..., Any], case: Case) -> str:
    """Return whether a NaN in the first row is hidden, or reaches another row; empty if neither is."""
    given = copies(case)
    given[0].view(len(given[0]), -1)[0, -1] = torch.nan
    expected = kind.call(kind.reference, *(t.double() for t in given)).isnan()
    found = subject(*given).isnan()
    if (expected & ~found).any():
        return f"it returns numbers where an input is NaN; {REMEDY['hidden']}"
    if (found & ~expected).any():
        return f"a NaN in one row is in other rows too; {REMEDY['leaks']}"
    return ""


def copies(case: Case) -> list[Tensor]:
    """Return arguments that a kernel may write to; drawn ones are kept for other cases."""
    return [t.clone() for t in case.arguments.values()]


def touched(watched: Watched, found: Tensor) -> str:
    """Return whether a call wrote to its inputs, or returns their memory."""
    for at, now, before in watched.tensors():
        if not bits.equal(now.detach(), before):
            return f"it writes to argument {at}; {REMEDY['writes']}"
        mine, other = found.untyped_storage(), now.untyped_storage()
        if found.numel() and mine.data_ptr() == other.data_ptr():
            return f"its output shares memory with argument {at}; {REMEDY['shares']}"
    return ""


def fault_of_gradients(
    kind: type[Operator], watched: Watched, subject: Callable[..., Any], case: Case
) -> str:
    """Return what is wrong with a call and its gradients, and what to do; empty if nothing is."""
    wide = {name: t.double() for name, t in case.arguments.items()}
    shape = kind.call(kind.reference, *wide.values()).shape
    upstream = case.draw(tuple(shape), UPSTREAM)
    names = list(kind.gradients(wide, upstream.double()))
    leaves = {n: t.detach().clone().requires_grad_(n in names) for n, t in case.arguments.items()}
    try:
        with torch.enable_grad():
            output = subject(*leaves.values())
        if fault := touched(watched, output):
            return f"with gradients enabled, {fault}"
        if not output.requires_grad:
            return f"its output has no gradient; {REMEDY['gradient']}"
        given = upstream.to(output.dtype, copy=True)
        found = torch.autograd.grad(output, [leaves[n] for n in names], given, allow_unused=True)
        found = tuple(None if t is None else t.clone() for t in found)
    except IsobitError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {in_one_line(error)[:200]}"
        return f"its backward raises {message}; {REMEDY['gradient']}"
    for name, gradient in zip(names, found, strict=True):
        if gradient is None:
            return f"{name} has no gradient; {REMEDY['gradient']}"
    if not bits.equal(given, upstream.to(output.dtype)):
        return f"its backward writes to the gradient that it is given; {REMEDY['writes']}"
    if fault := touched(watched, output):
        return f"its backward: {fault}"
    return ""


# Configurations of an autotuned kernel: `isobit check` compares their bits, as the autotuner chooses by time.


def judge_configurations(
    whole: Contract,
    options: Options,
    machine: Running,
    limit: int,
    progress: Callable[[str, int, int], None],
) -> tuple[ClaimRecord, str]:
    """Judge that each configuration has the bits of the first one that runs, and is accurate.

    The first `limit` configurations of each kernel are run, one kernel at a time, on one case per dtype.

    Returns:
        The record, and how many configurations were judged.
    """
    began, before = time.monotonic(), dict(machine.choices.chosen)
    kind, subject = operator_of(whole, options), find_subject(whole, options)
    cases = cases_of(whole)
    wanted = [dict(before)] + [
        {**before, name: text}
        for name, texts in machine.choices.seen.items()
        for text in texts[: max(limit, 1)]
        if text != before.get(name, texts[0])
    ]
    expected: list[torch.Tensor] = []
    tally, skipped = Tally(), 0
    try:
        for number, chosen in enumerate(wanted):
            changed = [f"{n} {t}" for n, t in chosen.items() if before.get(n) != t]
            progress(f"configurations, {', '.join(changed) or 'the first'}", number, len(wanted))
            machine.choices.chosen = chosen
            try:
                found = outputs(kind, subject, cases, tally)
            except ResourcesError:
                skipped += 1
                continue
            except FAULTS as error:
                tally.fail(f"{', '.join(changed)}: {in_one_line(error)}")
                continue
            for one, other in zip(found, expected, strict=bool(expected)):
                tally.same(one, other, f"{', '.join(changed)}, and the first configuration")
            expected = expected or found
    finally:
        machine.choices.chosen = before
    total = sum(len(texts) for texts in machine.choices.seen.values())
    record = ClaimRecord("configurations", "invariant", "kept", 2, 2, **tally.counts())
    words = f"{len(wanted) - skipped} of {total} configurations compared"
    if skipped:
        words += f", {skipped} more need too much of {machine.target}"
    if len(wanted) < total:
        words += f"; for all: --configurations {total}, or isobit certify"
    if tally.differing:
        remedy = "the autotuner chooses by time, so a result depends on the run; isobit certify names the order of each"
        record = replace(record, verdict="broken", level=1, at=2, detail=f"{tally.first}; {remedy}")
    return replace(record, seconds=round(time.monotonic() - began, 3)), words


def cases_of(whole: Contract) -> list[Case]:
    """Return the last small case of each dtype."""
    name, inputs = next(iter(whole.inputs.items()))
    return [
        Case(list(fixed_recipes(name, replace(inputs, dtypes=(dtype,))))[-1], inputs)
        for dtype in inputs.dtypes
    ]


def outputs(
    kind: type[Operator], subject: Callable[..., torch.Tensor], cases: list[Case], tally: Tally
) -> list[torch.Tensor]:
    """Return what the kernel returns for each case, and judge its accuracy."""
    found = []
    with torch.no_grad():
        for case in cases:
            kept: list[torch.Tensor] = []

            def noted(*given: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
                kept.append(subject(*given).clone())
                return kept[-1]

            kind.forward(noted, case, tally)
            found += kept
    return found
