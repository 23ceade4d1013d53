"""Contract files as pytest sees them: a file is a collector, and each of its claims is a test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from isobit.contracts.judge.run import judge_contract
from isobit.contracts.language.contract import Contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.ladder import unlinked
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from isobit.foundation.plain_text import plain
from isobit.foundation.records import ClaimRecord
from isobit.foundation.trusted_folder import serve_folder


class ContractFile(pytest.File):
    """One contract; its claims are judged when the first of them is run."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test per claim; an invalid contract or an obligation without a claim is a failing test."""
        try:
            contract = self.contract
        except ContractError as error:
            yield ClaimItem.from_parent(self, name="contract", claim="", problem=str(error))
            return
        reach = Workspace([Path(self.config.rootpath)]).tree.entries if contract.depends_on else {}
        for name in contract.depends_on:
            if name not in reach:  # a known contract is judged by its own file
                yield ClaimItem.from_parent(
                    self,
                    name=f"depends on {name}",
                    claim="",
                    problem=f"{name} is not a known contract",
                )
        for name in unlinked(contract):
            yield ClaimItem.from_parent(
                self, name=name, claim="", problem=f"unbound: {name} has no claim"
            )
        for claim in contract.claims:
            yield ClaimItem.from_parent(self, name=claim.id, claim=claim.id, problem="")

    @cached_property
    def contract(self) -> Contract:
        """The contract, parsed once."""
        return load_contract(self.path)

    @cached_property
    def records(self) -> dict[str, ClaimRecord]:
        """Records by claim."""
        config = self.config
        level = int(str(config.getoption("--isobit-level"))[1:])
        options = Options(tuple(config.getoption("--isobit-trust")), level)
        # A trusted package may be in the folder where pytest was called.
        serve_folder(options.trusted, str(config.invocation_params.dir))
        return {record.claim: record for record in judge_contract(self.contract, options)}


class ClaimItem(pytest.Item):
    """A test that fails unless its claim is kept at the level to reach."""

    def __init__(self, *, claim: str, problem: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.claim, self.problem = claim, problem

    def runtest(self) -> None:
        """Raise unless the claim is kept."""
        if self.problem:
            raise NotKept(plain(self.problem))
        assert isinstance(self.parent, ContractFile)
        record = self.parent.records[self.claim]
        wanted = min(record.required, int(str(self.config.getoption("--isobit-level"))[1:]))
        if record.verdict != "kept" or record.level < wanted:
            counts = f"{record.differing:,} of {record.compared:,} differ, {record.inputs:,} inputs, L{record.level}"
            causes = f"\nlikely causes: {record.if_fails}" if record.if_fails else ""
            words = f"{record.verdict}: {counts}: {record.detail}{causes}\n{record.replay}"
            raise NotKept(plain(words.rstrip()))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the verdict without a traceback."""
        return (
            str(excinfo.value)
            if isinstance(excinfo.value, NotKept)
            else super().repr_failure(excinfo, style)
        )

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the place and name that pytest shows."""
        return self.path, None, f"contract claim {self.name}"


class NotKept(AssertionError):
    """A claim that is not kept."""
