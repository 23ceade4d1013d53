"""A pytest plugin: `pytest --isobit` collects contract files, one test per claim.

Pytest imports this module in every test run of everybody who has isobit installed, so it imports nothing but pytest.
The engine of contracts is imported by the first contract file that is collected.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; without --isobit the plugin does nothing."""
    group = parser.getgroup("isobit")
    group.addoption(
        "--isobit",
        action="store_true",
        help="collect contract.yaml and *.contract.yaml, one test per claim",
    )
    group.addoption(
        "--isobit-trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose code contracts may name",
    )
    group.addoption(
        "--isobit-level",
        default="L4",
        choices=("L2", "L3", "L4"),
        help="the highest level to judge (default L4)",
    )


@pytest.fixture
def isobit_audit() -> Callable[..., Any]:
    """Return a function that audits a model as `isobit.audit` does, and fails the test unless it is kept.

    It returns the report. `isobit_audit(model, batch, vary=("batch",))` in a test fails with the guilty operators.
    """
    from isobit.auditing.api import audit  # loads torch, which pytest itself does not need

    def check(*args: Any, **named: Any) -> Any:
        report = audit(*args, **named)
        if not report.kept:
            pytest.fail(str(report), pytrace=False)
        return report

    return check


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> pytest.Collector | None:
    """Collect contract files by name."""
    if not parent.config.getoption("--isobit"):
        return None
    if file_path.name == "contract.yaml" or file_path.name.endswith(".contract.yaml"):
        from isobit.contracts.pytest_items import ContractFile

        found: pytest.Collector = ContractFile.from_parent(parent, path=file_path)
        return found
    return None
