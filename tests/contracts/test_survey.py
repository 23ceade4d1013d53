"""Surveys at the threshold: one ulp below the limit and the limit are kept, one ulp above is broken; NaN, inf break."""

import math

import pytest
import torch

from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.recipes import Case, Recipe
from isobit.contracts.judge.relations import RELATIONS
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Claim, Contract, Inputs
from isobit.contracts.options import Options

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
STEPS = 4  # the limit, in ulps of a result in [1, 2)

# The error in ulps of the result, or what stands in its place; and the verdict.
SURVEY = {
    "limit - 1 ulp": (STEPS - 1, "kept"),
    "limit": (STEPS, "kept"),
    "limit + 1 ulp": (STEPS + 1, "broken"),
    "0": (0, "kept"),
    "NaN": (math.nan, "broken"),
    "+inf": (math.inf, "broken"),
    "-inf": (-math.inf, "broken"),
    "empty": (0, "vacuous"),
}
# Of each relation: its parameters by the dtype's ulp, the exact row, and which element of it is put off by the error.
RULES = {
    "accurate abs": (
        "accurate",
        lambda ulp: {"against": "a:b", "limit": STEPS * ulp, "unit": "abs"},
        (1.0, 1.0),
    ),
    "accurate rel": (
        "accurate",
        lambda ulp: {"against": "a:b", "limit": STEPS * ulp, "unit": "rel"},
        (8.0, 1.0),
    ),
    # The row's largest is 2, so that the limit is half as many of it.
    "accurate norm": (
        "accurate",
        lambda ulp: {"against": "a:b", "limit": STEPS / 2 * ulp, "unit": "norm"},
        (-2.0, 1.0),
    ),
    "accurate ulp": (
        "accurate",
        lambda ulp: {"against": "a:b", "limit": STEPS, "unit": "ulp"},
        (1000.0, 1.0),
    ),
    "gradient abs": (
        "gradient",
        lambda ulp: {"against": "a:b", "limit": STEPS * ulp, "unit": "abs", "of": "-"},
        (0, 1.0),
    ),
    "parity abs": (
        "parity",
        lambda ulp: {"against": "a:b", "limit": STEPS * ulp, "unit": "abs"},
        (1.0, 1.0),
    ),
    "parity rel": (
        "parity",
        lambda ulp: {"against": "a:b", "limit": STEPS * ulp, "unit": "rel"},
        (8.0, 1.0),
    ),
    "parity ulp": (
        "parity",
        lambda ulp: {"against": "a:b", "limit": STEPS, "unit": "ulp"},
        (1000.0, 1.0),
    ),
    "bound": ("bound", lambda ulp: {"low": -1, "high": 1 + STEPS * ulp}, (0.0, 1.0)),
    "sums_to": ("sums_to", lambda ulp: {"total": 1.0, "limit": STEPS * ulp}, (0.0, 1.0)),
}


def verdict(relation: str, params: dict, found: torch.Tensor, exact: torch.Tensor) -> str:
    """As verify says it from a tally."""
    dtype = str(found.dtype).removeprefix("torch.")
    rows = len(found)
    inputs = Inputs({"x": ("rows", 2)}, {"rows": (1,)}, rows="rows")
    case = Case(Recipe("few", dtype, (("rows", rows),), "normal"), inputs)
    claim = Claim("c", ("O",), relation, "L2", inputs=("few",), params=params)
    code = {"a:b": lambda *arguments, **options: exact}
    tally = Tally()
    contract = Contract("c-v1", "1", "c", (), inputs={"few": inputs}, claims=(claim,))
    bound = Bound(contract, claim, Options(), lambda *arguments, **options: found, code)
    RELATIONS[relation](bound, case, tally)
    assert (tally.first != "") == (tally.differing > 0)
    return "broken" if tally.differing else "kept" if tally.compared else "vacuous"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", SURVEY)
@pytest.mark.parametrize("rule", RULES)
def test_at_the_threshold(rule, what, dtype):
    relation, params_of, row = RULES[rule]
    error, expected = SURVEY[what]
    ulp = torch.finfo(DTYPES[dtype]).eps
    rows = 0 if what == "empty" else 3
    exact = torch.tensor([row] * rows, dtype=torch.float64).reshape(rows, 2)
    found = exact.clone()
    found[rows // 2 : rows // 2 + 1, 1] = 1.0 + error * ulp
    # Errors are whole ulps, so nothing is rounded here: what is surveyed is the comparison.
    assert (
        torch.equal(found.to(DTYPES[dtype]).double().nan_to_num(9), found.nan_to_num(9))
        or error == math.inf
    )
    other = exact.to(DTYPES[dtype]) if relation == "parity" else exact
    assert verdict(relation, params_of(ulp), found.to(DTYPES[dtype]), other) == expected


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("relation", ["accurate", "parity", "bound", "sums_to"])
def test_at_the_limit_itself(relation, sign):
    """Around zero the error is the output: the limit's own neighbours among fp64 are told apart."""
    limit = 1e-5
    params = {
        "against": "a:b",
        "limit": limit,
        "unit": "abs",
        "low": -limit,
        "high": limit,
        "total": 0.0,
    }
    exact = torch.zeros(1, 2, dtype=torch.float64)
    for error, expected in (
        (math.nextafter(limit, 0), "kept"),
        (limit, "kept"),
        (math.nextafter(limit, 1), "broken"),
        (5e-324, "kept"),
        (0.0, "kept"),
    ):
        found = torch.tensor([[0.0, sign * error]], dtype=torch.float64)
        assert verdict(relation, params, found, exact) == expected, error


@pytest.mark.parametrize("relation", ["accurate", "parity"])
@pytest.mark.parametrize("unit", ["abs", "rel", "norm", "ulp"])
def test_what_is_not_finite_must_be_the_same(relation, unit):
    params = {"against": "a:b", "limit": 1e30, "unit": unit}
    odd = (math.nan, math.inf, -math.inf, 1.0)
    for found in odd:
        for exact in odd:
            same = found == exact or (math.isnan(found) and math.isnan(exact))
            pair = (torch.tensor([[1.0, found]]), torch.tensor([[1.0, exact]]))
            assert verdict(relation, params, *pair) == ("kept" if same else "broken"), (
                found,
                exact,
            )


@pytest.mark.parametrize("unit", ["rel", "norm"])
def test_of_nothing_only_nothing_is_within(unit):
    params = {"against": "a:b", "limit": 0.5, "unit": unit}
    exact = torch.zeros(1, 2, dtype=torch.float64)
    assert verdict("accurate", params, torch.zeros(1, 2), exact) == "kept"
    assert verdict("accurate", params, torch.tensor([[0.0, 1e-45]]), exact) == "broken"


def test_parity_without_a_limit_is_of_bits():
    for found, exact, expected in (
        (1.0, 1.0, "kept"),
        (1.0, math.nextafter(1.0, 2), "broken"),
        (0.0, -0.0, "broken"),
        (math.inf, math.inf, "kept"),
        (math.nan, math.nan, "kept"),
        (math.nan, 1.0, "broken"),
    ):
        pair = [torch.tensor([[1.0, value]], dtype=torch.float64) for value in (found, exact)]
        assert verdict("parity", {"against": "a:b"}, *pair) == expected, (found, exact)
    assert verdict("parity", {"against": "a:b"}, torch.zeros(0, 2), torch.zeros(0, 2)) == "vacuous"


def test_other_shapes_and_dtypes_break():
    params = {"against": "a:b", "limit": 1.0, "unit": "abs"}
    for relation in ("accurate", "parity"):
        assert verdict(relation, params, torch.zeros(1, 2), torch.zeros(1, 3)) == "broken"
        assert verdict(relation, params, torch.zeros(0, 2), torch.zeros(1, 2)) == "broken"
    assert (
        verdict(
            "parity", {"against": "a:b"}, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.float64)
        )
        == "broken"
    )
