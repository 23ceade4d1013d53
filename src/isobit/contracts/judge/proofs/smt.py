"""Asks Bitwuzla about IEEE arithmetic: a formula in SMT-LIB whose unsatisfiability is the proof."""

from __future__ import annotations

import importlib
from typing import Any

from isobit.errors import EngineError

HEADER = "(set-logic ALL)\n(define-sort F () (_ FloatingPoint 8 24))\n"


def bitwuzla() -> Any:
    """The solver's module, or a refusal."""
    try:
        return importlib.import_module("bitwuzla")
    except ImportError as error:
        raise EngineError(
            expected="Bitwuzla, which proves claims about IEEE arithmetic",
            received=str(error),
            remedy="pip install hypothesis z3-solver bitwuzla python-flint",
        ) from None


def is_unsatisfiable(formula: str, seconds: float = 60.0) -> bool:
    """True: no values satisfy it. False: some do. Giving up is neither, and is raised."""
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
    """An fp32 constant."""
    return f"((_ to_fp 8 24) RNE {value:.30f})"


def declare(names: list[str]) -> str:
    """fp32 variables."""
    return "".join(f"(declare-const {name} F)\n" for name in names)


def add(left: str, right: str) -> str:
    """An fp32 addition, rounded to nearest."""
    return f"(fp.add RNE {left} {right})"
