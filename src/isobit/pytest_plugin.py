"""A pytest plugin: `pytest --isobit` collects contract files, a test a claim."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from isobit.contracts.language.load import load_contract
from isobit.contracts.store.ladder import unlinked
from isobit.contracts.workspace import Run, Workspace, judge_file
from isobit.errors import ContractError
from isobit.plain_text import plain
from isobit.records import ClaimRecord
from isobit.trusted_folder import serve_folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Off unless asked for."""
    group = parser.getgroup("isobit")
    group.addoption(
        "--isobit",
        action="store_true",
        help="collect contract.yaml and *.contract.yaml: a test a claim",
    )
    group.addoption(
        "--isobit-trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="whose code may be named",
    )
    group.addoption(
        "--isobit-level",
        default="L4",
        choices=("L2", "L3", "L4"),
        help="how high to climb (default L4)",
    )


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> pytest.Collector | None:
    """Contract files, by name."""
    if not parent.config.getoption("--isobit"):
        return None
    if file_path.name == "contract.yaml" or file_path.name.endswith(".contract.yaml"):
        found: pytest.Collector = ContractFile.from_parent(parent, path=file_path)
        return found
    return None


class ContractFile(pytest.File):
    """One contract; its claims are judged when the first of them is run."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one test per claim; a file that is no contract, or has an unchecked obligation, is a failing test."""
        try:
            contract = load_contract(self.path)
        except ContractError as error:
            yield ClaimItem.from_parent(self, name="contract", claim="", problem=str(error))
            return
        reach = Workspace([Path(self.config.rootpath)]).tree.entries if contract.depends_on else {}
        for name in contract.depends_on:
            if name not in reach:  # where it is in reach, its own file is judged
                yield ClaimItem.from_parent(
                    self, name=f"rests on {name}", claim="", problem=f"{name} is not in reach"
                )
        for name in unlinked(contract):
            said = f"unbound: no claim makes {name} executable"
            yield ClaimItem.from_parent(self, name=name, claim="", problem=said)
        for claim in contract.claims:
            yield ClaimItem.from_parent(self, name=claim.id, claim=claim.id, problem="")

    @cached_property
    def records(self) -> dict[str, ClaimRecord]:
        """By claim."""
        config = self.config
        level = int(str(config.getoption("--isobit-level"))[1:])
        run = Run(tuple(config.getoption("--isobit-trust")), level)
        serve_folder(
            run.trusted, str(config.invocation_params.dir)
        )  # a trusted package may stand where pytest was called
        return {record.claim: record for record in judge_file(str(self.path), run, float("inf"))}


class ClaimItem(pytest.Item):
    """Fails unless its claim is kept, at the level asked for."""

    def __init__(self, *, claim: str, problem: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.claim, self.problem = claim, problem

    def runtest(self) -> None:
        """Everything but kept is a failure."""
        if self.problem:
            raise NotKept(plain(self.problem))
        assert isinstance(self.parent, ContractFile)
        record = self.parent.records[self.claim]
        wanted = min(record.required, int(str(self.config.getoption("--isobit-level"))[1:]))
        if record.verdict != "kept" or record.level < wanted:
            counts = f"{record.differing:,} of {record.compared:,} differ, {record.inputs:,} inputs, L{record.level}"
            raise NotKept(
                plain(f"{record.verdict}: {counts}: {record.detail}\n{record.replay}".rstrip())
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the verdict without a traceback through the judge."""
        return (
            str(excinfo.value)
            if isinstance(excinfo.value, NotKept)
            else super().repr_failure(excinfo, style)
        )

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """As pytest lists it."""
        return self.path, None, f"contract claim {self.name}"


class NotKept(AssertionError):
    """A claim that is not kept."""
