"""`isobit check`: judge any kernel by claims that do not require isobit's own bits."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isobit.cli.arguments import SHORT, add_engine, at_least_one, long_dtype
from isobit.cli.contract_options import exit_code
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.cli.verify import claims_table
from isobit.contracts.authoring.explain import explain
from isobit.contracts.language.contract import Contract
from isobit.contracts.options import Options
from isobit.contracts.report.page import draw_contracts
from isobit.errors import ArgumentError, EngineError, IsobitError, in_one_line
from isobit.foundation import files
from isobit.foundation.engines import LOCAL, check_engine, open_engine
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
        help="package.module:name or FILE.py:name, of a function or module; it is imported, also from here. "
        "FOLDER:name judges that name of every Python file in a folder",
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
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=1,
        metavar="N",
        help="number of local processes that judge the kernels of a folder (default: %(default)s)",
    )
    add_engine(parser)
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
    folder, _, name = arguments.code.rpartition(":")
    if folder and Path(folder).is_dir():
        return run_folder(arguments, Path(folder), name)
    if arguments.on != LOCAL or arguments.jobs > 1:
        raise ArgumentError(
            expected="a folder of kernels with --jobs or --on",
            received=arguments.code,
            remedy="name a folder, as kernels:rms_norm, or leave these options out",
        )
    found = check(arguments)
    provenance = provenance_of(arguments, [found.status.id, repr(found.status.claims)])
    if arguments.html:
        lines = tuple(f"{name}: {line}" for name, lines in found.judged.items() for line in lines)
        about = Section("how it was judged", lines, "about", found.contract.id)
        sections = {found.contract.id: (about, *explain(found.contract, found.status))}
        title = f"isobit check {arguments.code}"
        files.write_text(
            arguments.html, draw_contracts([found.status], sections, title, provenance)
        )
    if arguments.json:
        say_json({"provenance": provenance, **found.record(arguments.like)})
    else:
        show(found, arguments)
    return found.exit_code


@dataclass(frozen=True)
class Checked:
    """A kernel or a tool that was judged.

    Attributes:
        code: What was judged.
        contract: Its claims.
        status: What was found.
        judged: How it ran and at which sizes, in words.
        left: Claims that are judged when the call has no fault.
        left_out: Claims that --claims leaves out.
    """

    code: str
    contract: Contract
    status: ContractStatus
    judged: dict[str, list[str]] = field(default_factory=dict)
    left: int = 0
    left_out: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return exit_code([claim.verdict for claim in self.status.claims])

    def record(self, like: str) -> dict[str, Any]:
        """Return what --json prints."""
        kind = "tool" if like in TOOLS else "kernel"
        return {kind: self.code, **self.judged, "contract": self.status}


def check(arguments: argparse.Namespace) -> Checked:
    """Judge the claims of an operator, or of a tool's contract."""
    return check_tool(arguments) if arguments.like in TOOLS else check_kernel(arguments)


def run_folder(arguments: argparse.Namespace, folder: Path, name: str) -> int:
    """Judge one name of every Python file in a folder, each as a task of its own."""
    check_engine(arguments.on)
    kernels = [f"{file}:{name}" for file in sorted(folder.resolve().glob("*.py"))]
    if not kernels or arguments.html:
        raise ArgumentError(
            expected="Python files in the folder" if not kernels else "--json for a folder",
            received=f"none in {folder}" if not kernels else f"--html {arguments.html}",
            remedy="name a folder of kernels" if not kernels else "write --html of one kernel",
        )
    found: dict[str, dict[str, Any]] = {}
    with Steps(f"{len(kernels)} kernels", len(kernels), arguments.quiet) as steps:
        for code, record in judge_kernels(arguments, kernels):
            found[code] = record
            steps.done(f"{Path(code).name}: {record['words']}")
    records = [found[code] for code in kernels]
    codes = [record["exit_code"] for record in records]
    if arguments.json:
        provenance = provenance_of(arguments, [repr(records)])
        say_json({"provenance": provenance, "kernels": records})
    else:
        console = make_console(132)
        for record in records:
            words = f"{Path(record['kernel']).name}: {record['words']}"
            console.print(one_line(words), markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"{folder} as {arguments.like}: of {len(codes)} kernels {codes.count(0)} kept, {codes.count(1)} broken, "
            f"{len(codes) - codes.count(0) - codes.count(1)} could not be judged"
        )
    return 1 if 1 in codes else max(codes)


def judge_kernels(
    arguments: argparse.Namespace, kernels: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge kernels as tasks; one whose process dies is judged once more by itself, and then has no verdict."""
    died = []
    with open_engine(arguments.on, arguments.jobs) as pool:
        tasks = {pool.submit(judge_one, arguments, code): code for code in kernels}
        for task in as_completed(tasks):
            try:
                yield tasks[task], task.result()
            except BrokenProcessPool:
                died.append(tasks[task])
    for code in died:
        with open_engine(LOCAL, 1) as pool:
            try:
                yield code, pool.submit(judge_one, arguments, code).result()
            except BrokenProcessPool:
                words = "could not be judged: its process died"
                yield code, {"kernel": code, "exit_code": 2, "words": words}


def judge_one(arguments: argparse.Namespace, code: str) -> dict[str, Any]:
    """Judge one kernel in a process of its own; return the record that --json prints, and the verdict in words."""
    own = argparse.Namespace(**{**vars(arguments), "code": code, "quiet": True})
    try:
        found = check(own)
    except (IsobitError, OSError) as error:
        words = f"could not be judged: {in_one_line(error)}"
        return {"kernel": code, "exit_code": 2, "words": words}
    claims = found.status.claims
    wrong = [f", {one.claim} {one.verdict}" for one in claims if one.verdict != "kept"]
    words = f"{len(claims) - len(wrong)} of {len(claims)} claims kept{''.join(wrong)}"
    return {**found.record(own.like), "exit_code": found.exit_code, "words": words}


def check_kernel(arguments: argparse.Namespace) -> Checked:
    """Judge the claims of an operator on the named function."""
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
    return Checked(
        arguments.code,
        contract,
        status_of(contract, arguments.code, records),
        {"run": how.words(), "sizes": sizes_in_words(contract)},
        len(contract.claims) if first.verdict != "kept" else 0,
        len(whole.claims) - len(contract.claims),
    )


def check_tool(arguments: argparse.Namespace) -> Checked:
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
    is_kept = all(record.verdict == "kept" for record in records)
    return Checked(
        arguments.code,
        contract,
        status_of(contract, arguments.code, records),
        judged={"information": [retokenised(tokenizer)]} if tokenizer and is_kept else {},
        left_out=len(whole.claims) - len(contract.claims),
    )


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


def show(found: Checked, arguments: argparse.Namespace) -> None:
    """Print the claims, each counter-example, how it was judged, the totals, and how many claims are left."""
    console, status = make_console(132), found.status
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
    for name, lines in found.judged.items():
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
    if found.left:
        console.print(f"{found.left} other claims are judged when the call has no fault")
    if found.left_out:
        console.print(f"{found.left_out} claims are left out by --claims")
