"""`isobit check`: judge any kernel by claims that do not require isobit's own bits."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isobit.cli.arguments import SHORT, long_dtype
from isobit.cli.contract_options import exit_code
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.cli.verify import claims_table
from isobit.contracts.authoring.explain import explain
from isobit.contracts.language.contract import Contract
from isobit.contracts.options import Options
from isobit.contracts.report.page import draw_contracts
from isobit.errors import ArgumentError, EngineError, in_one_line
from isobit.foundation import files
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import ClaimRecord, ContractStatus, Section
from isobit.foundation.trusted_folder import serve_folder
from isobit.library.any_kernel.signatures import CONTRACT_OF, LIKE, TOOLS

TARGET = "sm_90"
CONFIGURATIONS = 8


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        description="Judge a function that computes a known operator: rows do not depend on their batch, storage and "
        "threads change nothing, output and gradients are within the error of any order of addition. isobit's own "
        "bits are not required. Exit 0: all kept; 1: something is broken; 2: it could not be called.",
        epilog="called as: " + "; ".join([*LIKE.values(), *TOOLS.values()]),
    )
    parser.add_argument(
        "code",
        metavar="CODE",
        help="package.module:name or FILE.py:name, of a function or module; it is imported, also from here",
    )
    parser.add_argument(
        "--like", required=True, choices=sorted([*LIKE, *TOOLS]), help="what it computes"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        type=long_dtype(*SHORT),
        metavar="DTYPE",
        help="judge this dtype only; repeatable (default: fp32, bf16 and fp16)",
    )
    parser.add_argument(
        "--with",
        dest="named",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of the call, or of a class's constructor, as eps=1e-6; repeatable",
    )
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="judge the output alone, for kernels without a backward",
    )
    parser.add_argument(
        "--device", default="cpu", help="where inputs are when the kernel is called (default cpu)"
    )
    parser.add_argument(
        "--target",
        default=TARGET,
        metavar="GPU",
        help=f"the GPU that Triton kernels are compiled for when they run without one (default {TARGET})",
    )
    parser.add_argument(
        "--sizes",
        action="append",
        default=[],
        type=named_sizes,
        metavar="NAME=SIZE[,SIZE]",
        help="judge at these sizes of a name instead of the listed ones, as n=4096,32768; repeatable",
    )
    parser.add_argument(
        "--quick", action="store_true", help="judge at a few small sizes, for a first answer"
    )
    parser.add_argument(
        "--claims",
        action="extend",
        default=[],
        type=lambda text: [name for name in text.split(",") if name],
        metavar="NAME[,NAME]",
        help="judge these claims only, as rows,accuracy; repeatable",
    )
    parser.add_argument(
        "--configurations",
        type=int,
        default=CONFIGURATIONS,
        metavar="N",
        help="how many configurations of each autotuned kernel are compared when it runs without a GPU "
        f"(default {CONFIGURATIONS})",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="another package that CODE takes the function from",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write an HTML report with every claim"
    )
    add_quiet(parser)


def named_sizes(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse NAME=SIZE,SIZE."""
    name, _, rest = text.partition("=")
    try:
        sizes = tuple(int(size) for size in rest.replace("_", "").split(","))
    except ValueError:
        sizes = ()
    if not name.isidentifier() or not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"expected NAME=SIZE,SIZE as n=4096,32768, received {text}"
        )
    return name, sizes


def run(arguments: argparse.Namespace) -> int:
    """Judge the claims of an operator on the named function, or those of a tool's contract."""
    if arguments.like in TOOLS:
        return run_tool(arguments)
    from isobit.library.any_kernel.kernel_call import only_used, sizes_in_words
    from isobit.library.any_kernel.kernel_judging import (
        LEVEL,
        Wanted,
        chosen,
        judge_autotuned,
        judge_first_call,
        names_of_claims,
        seen_in_other_dtypes,
        status_of,
    )
    from isobit.library.any_kernel.kernel_run import running_kernels

    device = find_torch_device(arguments.device)
    code, folder = found_code(arguments.code)
    package = code.partition(".")[0].partition(":")[0]
    trusted = (package, *arguments.trust)
    options = Options(
        trusted=trusted, level=LEVEL, subject=with_keywords(code, arguments.named), device=device
    )
    asked = Wanted(arguments.like, arguments.forward_only, arguments.sizes, arguments.quick)
    whole = chosen(arguments.like, arguments.dtype, arguments.forward_only)
    wanted = names_of_claims(whole, arguments.claims)
    with running_kernels(device, arguments.target) as how:
        sized, first = judge_first_call(whole, options, how, asked)
        contract = only_used(
            replace(sized, claims=tuple(c for c in sized.claims if c.id in wanted))
        )
        records: tuple[ClaimRecord, ...] = (first,)
        if first.verdict == "kept":
            with Steps("configurations", len(wanted), arguments.quiet, every=SELDOM) as steps:
                records += tuple(
                    judge_autotuned(sized, options, how, arguments.configurations, steps.within)
                )
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


def run_tool(arguments: argparse.Namespace) -> int:
    """Judge a tool of post-training by the contract of its kind."""
    from isobit.contracts.language.load import load_contract
    from isobit.contracts.store.tree import library
    from isobit.library.any_kernel.kernel_judging import LEVEL, names_of_claims, status_of

    tokenizer = ""
    if arguments.like == "tokenizer" and arguments.code.endswith(".json"):
        file = Path(arguments.code).resolve()
        if not file.is_file():
            raise ArgumentError(
                expected="a tokenizer.json", received=arguments.code, remedy="name the file"
            )
        tokenizer = str(file)
        code, folder = f"isobit.library.post_training.tokenizing:of_file(path={tokenizer!r})", ""
    else:
        code, folder = found_code(arguments.code)
        code = with_keywords(code, arguments.named)
    package = code.partition(".")[0].partition(":")[0]
    options = Options(trusted=(package, *arguments.trust), level=LEVEL, subject=code, device="cpu")
    file = library() / "post_training" / f"{CONTRACT_OF[arguments.like]}.contract.yaml"
    whole = of_scheme(load_contract(file), arguments.like.partition("_")[2] or "int4")
    wanted = names_of_claims(whole, arguments.claims)
    contract = replace(whole, claims=tuple(c for c in whole.claims if c.id in wanted))
    with Steps("claims", len(wanted), arguments.quiet, every=SELDOM) as steps:
        records = tuple(judged(contract, options, steps))
    records = tuple(
        replace(record, replay=replay_of(record, "cpu", TARGET, folder)) for record in records
    )
    status = status_of(contract, arguments.code, records)
    is_kept = all(record.verdict == "kept" for record in records)
    about = {"information": [retokenised(tokenizer)]} if tokenizer and is_kept else {}
    if arguments.json:
        provenance = provenance_of(arguments, [contract.id, repr(records)])
        say_json({"provenance": provenance, "tool": arguments.code, **about, "contract": status})
    else:
        show(status, arguments, about, 0, len(whole.claims) - len(contract.claims))
    return exit_code([record.verdict for record in records])


def of_scheme(contract: Contract, scheme: str) -> Contract:
    """Leave out the claims whose inputs name another scheme of quantisation."""
    claims = tuple(
        claim
        for claim in contract.claims
        if all(contract.inputs[i].options.get("scheme", scheme) == scheme for i in claim.inputs)
    )
    return replace(contract, claims=claims)


def retokenised(path: str) -> str:
    """Say how many drawn sequences of ids a tokenizer changes when their text is encoded again."""
    from isobit.library.post_training.tokenizing import count_retokenised, opened

    changed, of = count_retokenised(opened(path))
    return f"encode(decode(ids)) is not ids for {changed:,} of {of:,} drawn sequences of 8 tokens"


def replay_of(record: ClaimRecord, device: str, target: str, folder: str) -> str:
    """Return the command that judges a case again; none for another device, as `contract replay` calls on the CPU."""
    if not record.replay or device != "cpu":
        return ""
    command = record.replay + f" --target {target}" * (target != TARGET)
    return f"cd {shlex.quote(folder)} && {command}" if folder else command


def find_torch_device(name: str) -> str:
    """Return the name of a device that is there.

    Raises:
        ArgumentError: If torch knows no such device.
        EngineError: If there is none here.
    """
    import torch

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
    """Add NAME=VALUE pairs to a kernel's name, where `isobit contract replay` finds them too."""
    return f"{code}({', '.join(named)})" if named else code


def judged(contract: Contract, options: Options, steps: Steps) -> Iterator[ClaimRecord]:
    """Judge each claim, and show progress."""
    from isobit.contracts.judge.verify import verify_contract

    names = [claim.id for claim in contract.claims]
    for at, record in enumerate(verify_contract(contract, options, progress=steps.within), 1):
        result = f"{record.claim}: {record.verdict}"
        steps.done(result, "".join(names[at : at + 1]), record.seconds)
        yield record


def show(
    status: ContractStatus,
    arguments: argparse.Namespace,
    judgement: dict[str, list[str]],
    left: int,
    left_out: int,
) -> None:
    """Print the claims, each counter-example, how it was judged, the totals, and how many claims are left."""
    console = make_console(132)
    console.print(claims_table([status], status.required))
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
