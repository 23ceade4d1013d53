"""`isobit check`: judge any kernel by claims that do not ask for isobit's own bits."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from isobit.cli.contract_options import exit_code
from isobit.cli.options.check import TARGET
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.cli.verify import claims_table
from isobit.contracts.authoring.explain import explain
from isobit.contracts.judge.bound import bind, named_function
from isobit.contracts.judge.verify import try_one, verify_contract
from isobit.contracts.language.contract import Contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.report.page import draw_contracts
from isobit.contracts.store import ladder
from isobit.contracts.store.tree import library
from isobit.errors import ArgumentError, EngineError, in_one_line
from isobit.foundation import files
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import ClaimRecord, ContractStatus, Section
from isobit.foundation.trusted_folder import serve_folder
from isobit.library.any_kernel.kernel_call import (
    first_call,
    only_used,
    sizes_in_words,
    with_few_sizes,
    with_given_sizes,
)
from isobit.library.any_kernel.kernel_run import KernelRun, running_kernels

LEVEL = 2
DTYPES = ("float32", "bfloat16", "float16")


def run(arguments: argparse.Namespace) -> int:
    """Judge the claims of an operator on the named function."""
    device = find_torch_device(arguments.device)
    code, folder = found_code(arguments.code)
    package = code.partition(".")[0].partition(":")[0]
    trusted = (package, *arguments.trust)
    options = Options(
        trusted=trusted, level=LEVEL, subject=with_keywords(code, arguments.named), device=device
    )
    whole = chosen(arguments.like, arguments.dtype, arguments.forward_only)
    wanted = names_of_claims(whole, arguments.claims)
    with running_kernels(device, arguments.target) as how:
        sized, first = judge_first_call(whole, options, arguments, how)
        contract = only_used(
            replace(sized, claims=tuple(c for c in sized.claims if c.id in wanted))
        )
        records: tuple[ClaimRecord, ...] = (first,)
        if first.verdict == "kept":
            with Steps("configurations", len(wanted), arguments.quiet, every=SELDOM) as steps:
                records += tuple(judge_autotuned(sized, options, arguments, how, steps))
                records += tuple(
                    seen_in_other_dtypes(record, contract, options)
                    for record in judged(contract, options, steps)
                )
    records = tuple(
        replace(record, replay=replay_of(record, device, arguments.target, folder))
        for record in records
    )
    status = status_of(contract, arguments.code, records)
    judgement = {"run": how.words(), "sizes": sizes_in_words(contract)}
    provenance = provenance_of(arguments, [contract.id, repr(records)])
    if arguments.html:
        lines = tuple(f"{name}: {line}" for name, lines in judgement.items() for line in lines)
        about = Section("how it was judged", lines, "about", contract.id)
        sections = {contract.id: (about, *explain(contract, status))}
        page = draw_contracts([status], sections, f"isobit check {arguments.code}", provenance)
        files.write_text(arguments.html, page)
    if arguments.json:
        kernel = {"kernel": arguments.code, **judgement}
        say_json({"provenance": provenance, **kernel, "contract": status})
    else:
        left = len(contract.claims) if first.verdict != "kept" else 0
        show(status, arguments, judgement, left, len(whole.claims) - len(contract.claims))
    return exit_code([record.verdict for record in records])


def judge_first_call(
    whole: Contract, options: Options, arguments: argparse.Namespace, how: KernelRun
) -> tuple[Contract, ClaimRecord]:
    """Return the contract at the sizes that suit how the kernel runs, and the record of the first call."""

    def sized(compiled: bool) -> Contract:
        if arguments.sizes:
            return with_given_sizes(whole, arguments.sizes)
        if compiled or arguments.quick:
            return with_few_sizes(whole, arguments.like, arguments.quick)
        return whole

    def call(compiled: bool) -> tuple[Contract, ClaimRecord]:
        contract = sized(compiled)
        return contract, first_call(contract, options, arguments.like, arguments.forward_only)

    how.attempt(lambda: named_function(whole, options))
    found = how.attempt_configurations(lambda: call(how.machine is not None))
    if how.machine is not None and not how.compiled:  # Triton is loaded, and launches nothing
        return call(compiled=False)
    return found


def replay_of(record: ClaimRecord, device: str, target: str, folder: str) -> str:
    """Return the command that judges a case again; none for another device, as `replay` calls on the CPU."""
    if not record.replay or device != "cpu":
        return ""
    command = record.replay + f" --target {target}" * (target != TARGET)
    return f"cd {shlex.quote(folder)} && {command}" if folder else command


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


def find_torch_device(name: str) -> str:
    """Return the name of a device that is there.

    Raises:
        ArgumentError: If torch knows no such device.
        EngineError: If there is none here.
    """
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        if re.search("Expected one of|Invalid device", str(error)):
            raise ArgumentError(
                expected="a device of torch",
                received=name,
                remedy="for example --device cuda",
            ) from None
        raise EngineError(
            expected=f"the device {name}",
            received=in_one_line(error)[:200],
            remedy="run where there is one, or leave --device out",
        ) from None
    return name


def found_code(code: str) -> tuple[str, str]:
    """Return `module:name` of a kernel, and the folder of its file if it was named by a file elsewhere.

    Raises:
        ArgumentError: If there is no such file, or another module has its name.
    """
    module, _, name = code.partition(":")
    if not name:
        raise ArgumentError(
            expected="package.module:function or FILE.py:function",
            received=code,
            remedy=f"name the kernel after a colon: {code or 'my_kernels.py'}:my_rms_norm",
        )
    if not module.endswith(".py"):
        return code, ""
    file = Path(module).resolve()
    if not file.is_file() or not file.stem.isidentifier():
        raise ArgumentError(
            expected="a Python file whose name is a word",
            received=f"no such file: {module}" if not file.is_file() else module,
            remedy="for example path/to/my_kernels.py:my_rms_norm",
        )
    serve_folder([file.stem], str(file.parent))
    spec = find_spec(file.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        raise ArgumentError(
            expected=f"{module} to be what `import {file.stem}` finds",
            received=str(spec and spec.origin),
            remedy="rename the file",
        )
    return f"{file.stem}:{name}", "" if file.parent == Path.cwd() else str(file.parent)


def with_keywords(code: str, named: list[str]) -> str:
    """Add NAME=VALUE pairs to a kernel's name, where `isobit replay` finds them too."""
    return f"{code}({', '.join(named)})" if named else code


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


def judge_autotuned(
    contract: Contract,
    options: Options,
    arguments: argparse.Namespace,
    how: KernelRun,
    steps: Steps,
) -> Iterator[ClaimRecord]:
    """Compare the configurations of kernels that are autotuned."""
    if how.machine is None or not how.autotuned:
        return
    from isobit.library.any_kernel.kernel_call import judge_configurations

    record, words = judge_configurations(
        contract, options, how.machine, arguments.configurations, steps.within
    )
    how.notes.append(words)
    yield record


def judged(contract: Contract, options: Options, steps: Steps) -> Iterator[ClaimRecord]:
    """Judge each claim, and show progress."""
    names = [claim.id for claim in contract.claims]
    for at, record in enumerate(verify_contract(contract, options, progress=steps.within), 1):
        result = f"{record.claim}: {record.verdict}"
        steps.done(result, "".join(names[at : at + 1]), record.seconds)
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


def show(
    status: ContractStatus,
    arguments: argparse.Namespace,
    judgement: dict[str, list[str]],
    left: int,
    left_out: int,
) -> None:
    """Print the claims, each counter-example, how it was judged, the totals, and how many claims are left."""
    console = make_console(132)
    console.print(claims_table([status], LEVEL))
    for claim in status.claims:
        if claim.verdict != "kept":
            console.print(
                one_line(f"{claim.verdict.upper()} {claim.claim}: {claim.detail}"),
                markup=False,
                highlight=False,
            )
            if claim.replay:
                console.print(f"  {claim.replay}", markup=False, soft_wrap=True)
    for name, lines in judgement.items():
        for line in lines:
            console.print(one_line(f"{name}: {line}"), markup=False, highlight=False)
    kept = sum(claim.verdict == "kept" for claim in status.claims)
    planted = [p for claim in status.claims for p in claim.planted]
    console.print(
        f"{arguments.code} as {arguments.like}: {kept} of {len(status.claims)} claims kept; "
        f"sabotage caught {sum(p.caught for p in planted)} of {len(planted)}; "
        f"{sum(c.inputs for c in status.claims):,} inputs, "
        f"{sum(c.compared for c in status.claims):,} comparisons",
        markup=False,
    )
    if left:
        console.print(f"{left} other claims are judged when the call has no fault")
    if left_out:
        console.print(f"{left_out} claims are left out by --claims")
