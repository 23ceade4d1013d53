"""Theorem: every bound of `isobit check` is derived from roundings, and a table with other bounds is rejected.

1. Every operator has a claim forward and backward, kept in fp32, bf16 and fp16, and each catches its wrong tables.
2. The rules of rounding hold: computed in fp32 and stored in 16 bits, no value has a larger error than they say.
3. Contract and how-to state the same numbers.
"""

import re
from pathlib import Path

import pytest
import torch

from isobit.cli.options.check import LIKE
from isobit.contracts.judge.recipes import Case, fixed_recipes
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.library.tolerances.claims import KERNELS, error_of
from isobit.library.tolerances.kernels import Rounded

CONTRACT = load_contract(library() / "tolerances" / "contract.yaml")


@pytest.fixture(scope="module")
def records():
    return {r.claim: r for r in verify_contract(CONTRACT, Options(level=2))}


def test_every_bound_is_derived(records):
    directions = ("forward", "backward")
    assert set(records) == {f"{like.replace('_', '-')}-{d}" for like in LIKE for d in directions}
    assert {name: (r.verdict, r.detail) for name, r in records.items()} == dict.fromkeys(
        records, ("kept", "")
    )
    assert all(r.cases >= 6 and r.compared > 100 for r in records.values())


def test_every_wrong_table_is_rejected(records):
    planted = [(name, p) for name, r in records.items() for p in r.planted]
    assert len(planted) >= 120
    assert [(name, p) for name, p in planted if not p.caught] == []
    assert all(len(r.planted) >= 4 for n, r in records.items() if n != "embedding-forward")


FUNCTIONS = {
    "product": (lambda a, b: a * b, lambda a, b: a * b),
    "sum of two": (lambda a, b: a + b, lambda a, b: a + b),
    "difference": (lambda a, b: a - b, lambda a, b: a - b),
    "matrix product": (lambda a, b: a @ b.mT, lambda a, b: a @ b.each(lambda t: t.mT)),
    "sum": (lambda a, b: a.sum(-1, keepdim=True), lambda a, b: a.sum(-1)),
    "mean of products": (lambda a, b: (a * b).mean(-1, keepdim=True), lambda a, b: (a * b).mean()),
    "exp": (lambda a, b: (a * b).exp(), lambda a, b: (a * b).exp()),
    "erf": (lambda a, b: (a * b).erf(), lambda a, b: (a * b).erf()),
    "log": (lambda a, b: (a * a).log(), lambda a, b: (a * a).log()),
    "rsqrt": (lambda a, b: (a * a).rsqrt(), lambda a, b: (a * a).rsqrt()),
    "reciprocal": (lambda a, b: 1 / (a + b), lambda a, b: (a + b).reciprocal()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rules_of_rounding_hold(name):
    computed, derived = FUNCTIONS[name]
    given = torch.randn(2, 40, 300, generator=torch.Generator().manual_seed(1))
    a, b = given
    exact = derived(Rounded.exact(a.double()), Rounded.exact(b.double()))
    found = computed(a, b)
    error = (found.double() - exact.value).abs()
    assert error.isfinite().all()
    assert (error <= error_of(exact, torch.float32)).all()
    for dtype in (torch.bfloat16, torch.float16):
        stored = (found.to(dtype).double() - exact.value).abs()
        large = exact.value.abs() > torch.finfo(dtype).max
        assert ((stored <= error_of(exact.stored(), dtype) + 2.0**-25) | large).all()
        assert (stored > error_of(exact, dtype)).any()  # a store that is not counted would show


def test_a_sum_can_be_as_wrong_as_its_rule_says():
    terms = torch.full((1, 1001), 2.0**-25)
    terms[0, 0] = 1
    total = terms[0, 0]
    for term in terms[0, 1:]:
        total = total + term  # half an ulp below 1 is lost every time
    rule = Rounded.exact(terms.double()).sum(-1)
    error = abs(float(total) - rule.value.item())
    allowed = error_of(rule, torch.float32).item()
    assert 0.4 * allowed < error <= allowed


def test_the_contract_states_how_many_values_are_stored():
    stated = " ".join(equation.domain for equation in CONTRACT.equations.values())
    for like, (kind, _, _) in KERNELS.items():
        assert f"{like}: s = {kind.FORWARD} and {kind.BACKWARD}" in stated


def test_the_page_states_how_many_terms_are_added():
    page = (Path(__file__).parents[2] / "docs/how-to/check-a-kernel.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| \d \| \d \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) == set(LIKE)
    for like, formulas in rows.items():
        inputs = CONTRACT.inputs[like]
        for recipe in fixed_recipes(like, inputs):
            given = Case(recipe, inputs).arguments
            sizes = {**dict(recipe.sizes), "outputs": 5, "depth": 16, "group": 3}
            stated = tuple(eval(f, {"max": max}, sizes) for f in formulas.split(" | "))
            assert stated == KERNELS[like][0].sums(given)
