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

from isobit import files
from isobit.cli.contract_options import exit_code
from isobit.cli.kernel_call import first_call
from isobit.cli.progress import Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.cli.verify import claims_table
from isobit.contracts.authoring.explain import explain
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.contract import Contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.contracts.store.tree import library
from isobit.errors import ArgumentError, EngineError, in_one_line
from isobit.plain_text import one_line
from isobit.records import ClaimRecord, ContractStatus
from isobit.report.contract_page import draw_contracts
from isobit.trusted_folder import serve_folder

LEVEL = 2


def run(arguments: argparse.Namespace) -> int:
    """Judge the claims of an operator on the named function."""
    device = find_torch_device(arguments.device)
    code, folder = found_code(arguments.code)
    package = code.partition(".")[0].partition(":")[0]
    trusted = (package, *arguments.trust)
    options = Options(
        trusted=trusted, level=LEVEL, subject=with_keywords(code, arguments.named), device=device
    )
    contract = chosen(arguments.like, arguments.dtype, arguments.forward_only)
    first = first_call(contract, options, arguments.like, arguments.forward_only)
    rest = judged(contract, options, arguments.quiet) if first.verdict == "kept" else ()
    records = (first, *rest)
    if device != "cpu":  # `replay` calls on the CPU
        records = tuple(replace(record, replay="") for record in records)
    if folder:
        records = tuple(
            replace(r, replay=r.replay and f"cd {shlex.quote(folder)} && {r.replay}")
            for r in records
        )
    status = status_of(contract, arguments.code, records)
    provenance = provenance_of(arguments, [contract.id, repr(records)])
    if arguments.html:
        sections = {contract.id: explain(contract, status)}
        page = draw_contracts([status], sections, f"isobit check {arguments.code}", provenance)
        files.write_text(arguments.html, page)
    if arguments.json:
        say_json({"provenance": provenance, "kernel": arguments.code, "contract": status})
    else:
        show(status, arguments, len(contract.claims) + 1 - len(records))
    return exit_code([record.verdict for record in records])


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


def judged(contract: Contract, options: Options, quiet: bool) -> Iterator[ClaimRecord]:
    """Judge each claim, and show progress."""
    names = [claim.id for claim in contract.claims]
    with Steps(names[0], len(names), quiet) as steps:
        for at, record in enumerate(verify_contract(contract, options), 1):
            steps.done(
                f"{record.claim}: {record.verdict}", "".join(names[at : at + 1]), record.seconds
            )
            yield record


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


def show(status: ContractStatus, arguments: argparse.Namespace, left: int) -> None:
    """Print the claims, each counter-example, the totals, and how many claims are left."""
    console = make_console(132)
    console.print(claims_table([status], LEVEL))
    for claim in status.claims:
        if claim.verdict != "kept":
            console.print(one_line(f"{claim.verdict.upper()} {claim.claim}: {claim.detail}"))
            if claim.replay:
                console.print(f"  {claim.replay}", markup=False, soft_wrap=True)
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
