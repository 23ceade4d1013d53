"""Write a first contract from a function's source, which is not imported; it fails until completed."""

from __future__ import annotations

import ast
import json
import keyword
import re
import textwrap
from dataclasses import dataclass

from isobit.contracts.language.contract import Contract
from isobit.contracts.language.schema import NAME, REFERENCE
from isobit.contracts.store.sources import find_file, stub_names
from isobit.errors import ContractError

MAX_HOPS = 8  # of `from a import b` to follow to the definition of a function
OF_A_COLUMN = ("weight", "bias", "scale", "gamma", "beta")
FILL = "FILL IN"

TEMPLATE = """\
# Made by `isobit new`. It is well-formed, but does not pass until you replace what is marked {fill}.
id: {id}
version: 0.1.0
title: {title}
subject: {subject}
output: [{output}]  # {fill}: the axes of the output, by size
equations:
  output:
    formula: {formula}
    # domain: {fill}: what the arguments may be
    # codomain: {fill}: what the output is, and where it is rounded
obligations:
  - id: INV-001
    equation: output
    text: >-
      A row of the output depends on that row and the parameters alone:
      not on how many rows there are, its position, its neighbours, storage or threads
  - id: ACC-001
    equation: output
    text: The output is within the limit of what the formula gives in exact arithmetic
inputs:
  plain:  # {fill}: the shapes that you run; the first inputs of a claim also serve L3 and the sabotage
    arguments:  # {fill}: the axes of each, by size
{arguments}
    sizes: {{rows: [65, 256], k: [64, 520]}}
    dtypes: [float32, bfloat16]
    values: normal
    edges: [zeros, subnormals, infinities, nans, empty, single]
    rows: rows
{options}claims:
  - id: rows
    obligations: [INV-001]
    relation: invariant
    under: [batch, position, neighbours, layout, threads]
    inputs: plain
    level: L3
  - id: accuracy
    obligations: [ACC-001]
    relation: accurate
    against: "{module}:reference_of_{function}"  # {fill}: write the formula plainly; it is called on fp64
    limit: 0  # {fill}: derive it from the formula, not from observed errors
    unit: ulp
    inputs: plain
    level: L3
"""


@dataclass(frozen=True)
class Signature:
    """The summary and parameters of a function, as its source declares them."""

    summary: str
    tensors: tuple[str, ...]
    needed: tuple[str, ...]
    defaults: tuple[str, ...]


def scaffold(name: str, reference: str) -> str:
    """Return the text of a contract for `package:function`; the user has to write its reference."""
    if not re.fullmatch(NAME.pattern, name):
        raise ContractError(
            expected=NAME.like, received=repr(name), remedy="for example softmax-kernel-v1"
        )
    if not re.fullmatch(REFERENCE.pattern, reference):
        raise ContractError(
            expected=REFERENCE.like,
            received=repr(reference),
            remedy="for example my_package.ops:softmax",
        )
    module, _, function = reference.partition(":")
    found = read_signature(find_function(module, function, reference), reference)
    if not found.tensors:
        raise ContractError(
            expected=f"a tensor among the parameters of {reference}",
            received=", ".join((*found.needed, *found.defaults)) or "no parameters",
            remedy="annotate it as Tensor; of integers alone, write a claim of relation algebra by hand",
        )
    axes = {
        tensor: "k" if at and tensor in OF_A_COLUMN else "rows, k"
        for at, tensor in enumerate(found.tensors)
    }
    return TEMPLATE.format(
        fill=FILL,
        id=name,
        title=quote(found.summary or f"{FILL}: what {function} promises"),
        subject=quote(reference),
        output="rows, k",
        formula=quote(
            f"{FILL}: output = {function}({', '.join(found.tensors)}) as a formula, with the order of its sums"
        ),
        arguments="\n".join(f"      {key(tensor)}: [{shape}]" for tensor, shape in axes.items()),
        options=options_of(found),
        module=module,
        function=function.replace(".", "_"),
    )


def options_of(found: Signature) -> str:
    """Return lines for parameters that are not tensors; those without a default must be filled in."""
    lines = []
    if found.needed:
        lines.append(f"    options:  # {FILL}: null is not a value")
        lines += [f"      {key(name)}: null" for name in found.needed]
    if found.defaults:
        lines.append(f"    # left at their defaults: {', '.join(found.defaults)}")
    return "".join(f"{line}\n" for line in lines)


def quote(text: str) -> str:
    """Quote text for YAML."""
    return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)


def key(name: str) -> str:
    """Quote a key if YAML would not read it as text."""
    return quote(name) if name.lower() in ("true", "false", "null") else name


def find_function(module: str, path: str, reference: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Find the definition of a function, following imports of its name."""
    for _ in range(MAX_HOPS):
        file = find_file(module)
        if file is None:
            raise missing(
                reference,
                f"no source of {module}",
                "correct the name, or run where it can be imported",
            )
        try:
            tree: ast.AST = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            raise missing(reference, f"{file}: {error}", "correct the file") from None
        names = path.split(".")
        node: ast.AST | None = tree
        for name in names:
            node = node and defined(node, name)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return node
        origin = imported(tree, names[0], module, file.name == "__init__.py")
        stub = file.with_suffix(".pyi")
        # A stub lists the names that a package imports lazily.
        if origin is None and file.name == "__init__.py" and stub.is_file():
            home = stub_names(stub.read_bytes()).get(names[0])
            origin = (home, names[0]) if home else None
        if origin is None:
            break
        module, path = origin[0], ".".join((origin[1], *names[1:]))
    raise missing(
        reference, f"no def of {path} in {module}", "name a function that is written in Python"
    )


def missing(reference: str, received: str, remedy: str) -> ContractError:
    """Build the error for a function whose source was not found."""
    return ContractError(expected=f"the source of {reference}", received=received, remedy=remedy)


def defined(node: ast.AST, name: str) -> ast.AST | None:
    """Return the last function or class of that name directly in a module or class."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = getattr(node, "body", [])
    return next((n for n in reversed(body) if isinstance(n, kinds) and n.name == name), None)


def imported(tree: ast.AST, name: str, module: str, is_package: bool) -> tuple[str, str] | None:
    """Return the module and name that a name is imported from, if it is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = module.split(".")
                    parts = parts[: len(parts) - node.level + is_package] if node.level else []
                    return ".".join([*parts, *([node.module] if node.module else [])]), alias.name
    return None


def read_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, reference: str) -> Signature:
    """Read the parameters: tensors by annotation, or if neither annotated nor defaulted."""
    arguments = node.args
    if arguments.posonlyargs:
        raise ContractError(
            expected=f"parameters of {reference} that can be passed by name",
            received=", ".join(a.arg for a in arguments.posonlyargs),
            remedy="wrap it in a function without /",
        )
    spread = [None] * (len(arguments.args) - len(arguments.defaults)) + [*arguments.defaults]
    pairs = [
        *zip(arguments.args, spread, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    tensors, needed, defaults = [], [], []
    for argument, default in pairs:
        words = ast.unparse(argument.annotation) if argument.annotation else ""
        if argument.arg in ("self", "cls"):
            continue
        if re.search(r"\bTensor\b", words) or (not words and default is None):
            tensors.append(argument.arg)
        elif default is None:
            needed.append(argument.arg)
        else:
            defaults.append(" ".join(f"{argument.arg}={ast.unparse(default)}".split()))
    summary = (ast.get_docstring(node) or "").strip().partition("\n")[0].strip()
    return Signature(summary, tuple(tensors), tuple(needed), tuple(defaults))


# Code to start from, for a contract: a function that raises, and a test per claim that fails until it is written.

MODULE = '''\
"""{title}.

Made by `isobit new --code {id}`: write the function, then run pytest {test}.
"""

from torch import Tensor


def {function}({parameters}) -> Tensor:
    """{title}.

{promises}
    """
    raise NotImplementedError("{function}: write it, then run pytest {test}")
'''

TESTS = '''\
"""The claims of {id}, a test each: they fail until {module}.{function} is written.

{obligations}
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = {contract}
CLAIMS = {claims}
WORDS = ["--subject", "{module}:{function}", "--trust", "{module}", "--level", "L2", "--json"]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Judge every claim once, on fixed inputs and on planted wrong functions."""
    evidence = ["--evidence", str(tmp_path_factory.mktemp("evidence"))]
    words = [sys.executable, "-m", "isobit", "verify", CONTRACT, *WORDS, *evidence]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout, done.stderr
    (contract,) = json.loads(done.stdout)["contracts"]
    return {{claim["claim"]: claim for claim in contract["claims"]}}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim(judged, claim):
    found = judged[claim]
    assert (found["verdict"], found["detail"]) == ("kept", "")
'''


def write_stubs(name: str, contract: Contract, where: str) -> dict[str, str]:
    """Return the text of NAME.py and test_NAME.py; `where` is the contract as `isobit verify` takes it.

    Raises:
        ContractError: The name is no module's, or the contract has no subject or no claims.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ContractError(
            expected="a name of a Python module", received=repr(name), remedy="for example my_norm"
        )
    if not contract.claims or not contract.inputs:
        raise ContractError(
            expected=f"claims and inputs in {contract.id}",
            received="none",
            remedy="write the contract first: isobit lint",
        )
    title = plain(contract.title).rstrip(".")
    words = {
        "id": contract.id,
        "title": title,
        "module": name,
        "function": name,
        "test": f"test_{name}.py",
        "parameters": parameters_of(contract),
        "promises": textwrap.indent(promises_of(contract), "    "),
        "obligations": "\n".join(f"{o.id}: {plain(o.text)}" for o in contract.obligations),
        "contract": json.dumps(where),
        "claims": json.dumps([claim.id for claim in contract.claims]),
    }
    return {f"{name}.py": MODULE.format(**words), f"test_{name}.py": TESTS.format(**words)}


def plain(text: str) -> str:
    """Return text that a docstring can have."""
    words = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(words.replace("\\", "/").replace('"', "'").split())


def promises_of(contract: Contract) -> str:
    """Return the equations, and the arguments with their shapes."""
    lines = [f"{name}: {plain(one.formula)}" for name, one in contract.equations.items()]
    first = next(iter(contract.inputs.values()))
    shapes = ", ".join(
        f"{name} [{', '.join(map(str, axes))}]" for name, axes in first.arguments.items()
    )
    made = " (drawn; the contract makes the arguments of them)" if contract.call else ""
    return "\n".join([*lines, f"Judged on {plain(shapes)}{made}, in {', '.join(first.dtypes)}."])


def parameters_of(contract: Contract) -> str:
    """Return the drawn arguments; if the contract makes others of them, those of its plainest subject."""
    first = next(iter(contract.inputs.values()))
    drawn = [f"{name}: Tensor" for name in first.arguments]
    named = [f"{name}={value!r}" for name, value in first.options.items()]
    if not contract.subject or not contract.call:
        return ", ".join([*drawn, *named])
    signatures = []
    for reference in (contract.subject, *contract.subjects.values()):
        module, _, function = reference.partition(":")
        signatures.append(read_signature(find_function(module, function, reference), reference))
    plainest = min(signatures, key=lambda found: len(found.tensors))
    return ", ".join([*(f"{name}: Tensor" for name in plainest.tensors), *named])
