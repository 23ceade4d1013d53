"""The steps of `isobit check`: the contract of an operator, the first call, and what is planted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from isobit.contracts.judge.bound import bind, named_function
from isobit.contracts.judge.verify import try_one
from isobit.contracts.language.contract import Contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.contracts.store.tree import library
from isobit.errors import ArgumentError
from isobit.foundation.records import ClaimRecord, ContractStatus
from isobit.library.any_kernel.kernel_call import first_call, with_few_sizes, with_given_sizes
from isobit.library.any_kernel.kernel_run import KernelRun

LEVEL = 2
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Wanted:
    """What a kernel is judged as.

    Attributes:
        like: The operator that it computes.
        forward_only: Whether gradients are left out.
        sizes: Sizes by name that replace the listed ones.
        quick: Whether few and small sizes are enough.
    """

    like: str
    forward_only: bool = False
    sizes: Sequence[tuple[str, tuple[int, ...]]] = ()
    quick: bool = False


def chosen(like: str, dtypes: list[str] | None, forward_only: bool = False) -> Contract:
    """Load an operator's contract, with the dtypes asked for, and without claims of gradients if asked."""
    contract = load_contract(library() / "any_kernel" / f"{like}.contract.yaml")
    if forward_only:
        kept = tuple(claim for claim in contract.claims if "gradient" not in claim.id)
        contract = replace(contract, claims=kept)
    if not dtypes:
        return contract
    inputs = {
        name: replace(drawn, dtypes=tuple(d for d in drawn.dtypes if d in dtypes))
        for name, drawn in contract.inputs.items()
    }
    return replace(contract, inputs=inputs)


def names_of_claims(contract: Contract, given: list[str]) -> list[str]:
    """Return the names of the claims to judge: those asked for, or all.

    Raises:
        ArgumentError: If the operator has no such claim.
    """
    known = [claim.id for claim in contract.claims]
    for name in given:
        if name not in known:
            raise ArgumentError(
                expected=f"claims of {contract.id}: {', '.join(known)}",
                received=f"--claims {name}",
                remedy="the claim `call` is always judged; --forward-only leaves out gradients",
            )
    return given or known


def judge_first_call(
    whole: Contract, options: Options, how: KernelRun, wanted: Wanted
) -> tuple[Contract, ClaimRecord]:
    """Return the contract at the sizes that suit how the kernel runs, and the record of the first call."""

    def sized(compiled: bool) -> Contract:
        if wanted.sizes:
            return with_given_sizes(whole, wanted.sizes)
        if compiled or wanted.quick:
            return with_few_sizes(whole, wanted.like, wanted.quick)
        return whole

    def call(compiled: bool) -> tuple[Contract, ClaimRecord]:
        contract = sized(compiled)
        return contract, first_call(contract, options, wanted.like, wanted.forward_only)

    how.attempt(lambda: named_function(whole, options))
    found = how.attempt_configurations(lambda: call(how.machine is not None))
    if how.machine is not None and not how.compiled:  # Triton is loaded, and launches nothing
        return call(compiled=False)
    return found


def judge_autotuned(
    contract: Contract,
    options: Options,
    how: KernelRun,
    count: int,
    progress: Callable[[str, int, int], None],
) -> Iterator[ClaimRecord]:
    """Compare `count` configurations of each kernel that is autotuned."""
    if how.machine is None or not how.autotuned:
        return
    from isobit.library.any_kernel.kernel_call import judge_configurations

    record, words = judge_configurations(contract, options, how.machine, count, progress)
    how.notes.append(words)
    yield record


def seen_in_other_dtypes(record: ClaimRecord, contract: Contract, options: Options) -> ClaimRecord:
    """Judge planted kernels again that were not caught in the dtypes of the command line, in all dtypes.

    An error of a thousandth is below the bound in bf16: it does not show that the claim notices nothing. Planted
    kernels that are made from the user's are judged in the user's dtypes alone.
    """
    if record.verdict != "void":
        return record
    inputs = {name: replace(drawn, dtypes=DTYPES) for name, drawn in contract.inputs.items()}
    whole = replace(contract, inputs=inputs)
    claim = next(claim for claim in contract.claims if claim.id == record.claim)
    bound = bind(whole, claim, options)
    planted = tuple(
        try_one(bound.plant(code), one.name)
        if not one.caught and ":" in (code := one.name.removeprefix("control "))
        else one
        for one in record.planted
    )
    record = replace(record, planted=planted)
    if not planted or not all(one.caught for one in planted):
        return record
    return replace(record, verdict="kept", level=LEVEL, detail="")


def status_of(contract: Contract, code: str, records: tuple[ClaimRecord, ...]) -> ContractStatus:
    """Return the status that pages and tables show."""
    verdict = ladder.worst(record.verdict for record in records)
    return ContractStatus(
        id=contract.id,
        version=contract.version,
        title=contract.title,
        path=contract.path,
        digest="",
        verdict=verdict,
        level=LEVEL if verdict == "kept" else 0,
        required=LEVEL,
        obligations=len(contract.obligations),
        claims=records,
        subject=code,
    )
