"""Code to start from, for a contract: a function that raises, and a test per claim that fails until it is written."""

from __future__ import annotations

import json
import keyword
import textwrap

from isobit.contracts.authoring.scaffold import find_function, read_signature
from isobit.contracts.language.contract import Contract
from isobit.errors import ContractError

MODULE = '''\
"""{title}.

Made by `isobit contract new --code {id}`: write the function, then run pytest {test}.
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
            remedy="write the contract first: isobit contract lint",
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
