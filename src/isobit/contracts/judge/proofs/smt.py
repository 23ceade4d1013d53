"""Prove statements about IEEE arithmetic with Bitwuzla: the negation in SMT-LIB must be unsatisfiable."""

from __future__ import annotations

import importlib
from typing import Any

from isobit.errors import EngineError

HEADER = "(set-logic ALL)\n(define-sort F () (_ FloatingPoint 8 24))\n"


def bitwuzla() -> Any:
    """Import the solver."""
    try:
        return importlib.import_module("bitwuzla")
    except ImportError as error:
        raise EngineError(
            expected="Bitwuzla, which proves claims about IEEE arithmetic",
            received=str(error),
            remedy="pip install hypothesis z3-solver bitwuzla python-flint",
        ) from None


def is_unsatisfiable(formula: str, seconds: float = 60.0) -> bool:
    """Return whether no values satisfy a formula; raise if the solver gives up."""
    solver = bitwuzla()
    options = solver.Options()
    options.set(solver.Option.TIME_LIMIT_PER, int(seconds * 1000))
    parser = solver.Parser(solver.TermManager(), options)
    parser.parse(HEADER + formula, True, False)
    found = str(parser.bitwuzla().check_sat()).lower()
    if found not in ("sat", "unsat"):
        raise EngineError(
            expected="Bitwuzla to decide the formula",
            received=f"{found} after {seconds:.0f} s",
            remedy="state it for fewer terms",
        )
    return found == "unsat"


def number(value: float) -> str:
    """Write an fp32 constant."""
    return f"((_ to_fp 8 24) RNE {value:.30f})"


def declare(names: list[str]) -> str:
    """Declare fp32 variables."""
    return "".join(f"(declare-const {name} F)\n" for name in names)


def add(left: str, right: str) -> str:
    """Write an fp32 addition, rounded to nearest."""
    return f"(fp.add RNE {left} {right})"
