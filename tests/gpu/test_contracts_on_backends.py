"""Contracts judged on the Triton executors: claims that apply are judged, others are named, wrong kernels are found.

`./check` judges a few claims of small cost; the full run judges every contract.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from isobit.certifying.running.backends import executing
from isobit.cli import main
from isobit.contracts.judge import run
from isobit.contracts.judge.recipes import Case, fixed_recipes
from isobit.contracts.judge.trusted_code import resolve
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.contracts.workspace import Workspace
from isobit.errors import ArgumentError, ContractError
from isobit.foundation import launches
from isobit.library.on_gpu.plans import (
    ELSEWHERE,
    PLANS,
    PLANTS_LEFT_OUT,
    BackendWorkspace,
    Plan,
    planted_in,
    reason_against,
)
from isobit.library.on_gpu.twin_names import AROUND, BY_CONTRACT, STOCK, TWINS
from isobit.library.on_gpu.twins import source

QUICK = {
    "silu-kernel-v1": ("anywhere", "accuracy", "gradient", "reflection", "executors-agree"),
    "rmsnorm-kernel-v1": (
        *("accuracy", "eps-is-inside-the-root", "gradient", "executors-agree"),
        *("scale", "norm-of-a-norm", "finite"),
    ),
    "gelu-kernel-v1": ("bounds", "grows-by-tanh"),
    "swiglu-kernel-v1": ("gating",),
    "rope-kernel-v1": ("frequencies",),
    "logprob-kernel-v1": ("range",),
    "adamw-kernel-v1": ("definition",),
    "softmax-kernel-v1": ("range", "one-is-one", "no-answer", "accuracy", "gradient"),
    "lm-head-kernel-v1": ("rounds-to-linear",),
}


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    home = tmp_path_factory.mktemp("backend") / ".isobit"
    return BackendWorkspace([library()], home, "interpreter", "sm_90")


def judged(contract, *claims):
    """Return the records of some claims of a derived contract."""
    chosen = tuple(c for c in contract.claims if not claims or c.id in claims)
    with executing("interpreter", target="sm_90"):
        return list(run.judge_contract(replace(contract, claims=chosen), Options()))


def test_every_claim_is_judged_or_named_with_a_reason(backend, tmp_path):
    cpu, total = Workspace([library()], tmp_path / ".isobit"), 0
    assert {*PLANS, *ELSEWHERE} == set(cpu.tree.entries)
    for name in cpu.tree.entries:
        found = backend.derived.derived[name]
        kept = [claim.id for claim in found.contract.claims] if found.contract else []
        left = [one.what for one in found.claims_left_out]
        assert sorted([*kept, *left]) == sorted(c.id for c in cpu.tree.load(name).claims)
        assert all(one.reason for one in (*found.claims_left_out, *found.parts_left_out))
        assert bool(kept) == (name in PLANS)
        assert found.cases <= found.cases_on_cpu
        total += len(kept)
    assert total > 100


def test_plans_name_only_what_contracts_have(backend, tmp_path):
    cpu = Workspace([library()], tmp_path / ".isobit")
    for name, plan in PLANS.items():
        contract = cpu.tree.load(name)
        claims = {claim.id for claim in contract.claims}
        assert {*plan.left_out, *plan.predicates} <= claims
        named = {*plan.sizes, *plan.inputs_left_out, *plan.dtypes, *plan.tried_first}
        assert named <= set(contract.inputs)
        for claim in backend.tree.load(name).claims:
            assert claim.inputs[0] in plan.tried_first or not {*claim.inputs} & {*plan.tried_first}
        for inputs, kept in plan.dtypes.items():
            assert set(kept) <= set(contract.inputs[inputs].dtypes)
            left = {one.what for one in backend.derived.derived[name].parts_left_out}
            for dtype in set(contract.inputs[inputs].dtypes) - set(kept):
                assert f"inputs {inputs} in {dtype}" in left
    planted = {n for name in PLANS for _, n in planted_in(cpu.tree.load(name))}
    planted = {name.removeprefix("control ") for name in planted}
    names = {*TWINS, *PLANTS_LEFT_OUT, *AROUND, *STOCK, *BY_CONTRACT["rmsnorm-kernel-v1"]}
    assert names <= planted


def test_every_planted_subject_has_a_twin_or_a_reason(backend, tmp_path):
    cpu, counted = Workspace([library()], tmp_path / ".isobit"), 0
    for name, plan in PLANS.items():
        twins = {**TWINS, **BY_CONTRACT.get(name, {})}
        for claim in cpu.tree.load(name).claims:
            if reason_against(claim, plan):
                continue
            for planted in (p for p in (*claim.sabotage, *claim.control) if ":" in p):
                found = [planted in group for group in (twins, AROUND, STOCK, PLANTS_LEFT_OUT)]
                assert found.count(True) == 1, f"{name}/{claim.id}: {planted} {found}"
                counted += 1
    assert counted > 100


@pytest.mark.full
@pytest.mark.parametrize("name", PLANS)
def test_planted_subjects_run_the_triton_executor(backend, name):
    """All but stock functions do; some of them only with many rows, or with one."""
    contract, tried = backend.tree.load(name), 0
    first = contract.claims[0].inputs[0]
    few, *more = (Case(r, contract.inputs[first]) for r in recipes(first, contract.inputs[first]))
    for planted in {p for c in contract.claims for p in (*c.sabotage, *c.control) if ":" in p}:
        subject = resolve(planted, ())
        with executing("interpreter"), launches.record_launches() as seen:
            for case in (few,) if planted in STOCK else (few, *more):
                subject(*case.arguments.values(), **case.options)
        runs = planted not in STOCK or planted.endswith(":recorded_only")  # which only says so
        assert any(one.executor == "triton" for one in seen) == runs, planted
        tried += 1
    assert tried


def recipes(name, inputs):
    """Return the first fixed recipe, it with rows enough for subjects that are right with few, and with one row."""
    recipe = next(fixed_recipes(name, inputs))
    sizes = [
        tuple((axis, rows if axis == inputs.rows else size) for axis, size in recipe.sizes)
        for rows in (40, 1)
    ]
    return recipe, *(replace(recipe, sizes=each) for each in sizes)


def test_every_planted_subject_resolves(backend):
    for name in PLANS:
        for _, planted in planted_in(backend.tree.load(name)):
            if ":" in planted:
                assert resolve(planted.removeprefix("control "), ()) is not None


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.sweep(4)
def test_claims_are_kept_and_sabotage_is_caught(backend, name):
    records = judged(backend.tree.load(name), *QUICK[name])
    assert {r.claim: r.verdict for r in records} == dict.fromkeys(QUICK[name], "kept")
    assert all(r.level == 2 and r.compared and r.planted for r in records)
    assert all(p.caught for r in records for p in r.planted)


@pytest.mark.full
@pytest.mark.parametrize("name", PLANS)
def test_contracts_are_kept(backend, name):
    records = judged(backend.tree.load(name))
    assert {f"{r.claim}: {r.verdict} {r.detail}".strip() for r in records} == {
        f"{r.claim}: kept" for r in records
    }


def test_a_wrong_executor_breaks_the_contract(backend):
    contract = backend.tree.load("silu-kernel-v1")
    wrong = source("isobit.ops.silu.triton", ("logistic(value)", "logistic(value * 1.0000001)"))
    with wrong():
        (record,) = judged(contract, "executors-agree")
    assert (record.verdict, record.at) == ("broken", 2)
    assert record.replay.endswith("--backend interpreter --target sm_90")


def test_a_claim_that_launches_nothing_is_vacuous(backend):
    contract = replace(
        backend.tree.load("silu-kernel-v1"),
        subject="isobit.library.elementwise:portable_silu",
    )
    (record,) = judged(contract, "executors-agree")
    assert (record.verdict, record.detail) == ("vacuous", run.NO_LAUNCH)


def test_twins_launch_the_triton_executor(backend):
    names = sorted({*TWINS.values(), *(n for each in BY_CONTRACT.values() for n in each.values())})
    names = [n for n in names if ":silu" in n or ":rms" in n or ":softmax" in n]
    x, weight = torch.randn(2, 20), torch.ones(20)
    for name in names:
        subject = resolve(name, ())
        with executing("interpreter"), launches.record_launches() as seen:
            subject(*((x, weight) if ":rms" in name else (x,)))
        assert [launch.executor for launch in seen] == ["triton"], name


def test_evidence_is_apart_from_the_cpus(backend, tmp_path):
    cpu = Workspace([library()], backend.home)
    other = BackendWorkspace([library()], backend.home, "interpreter", "sm_80")
    digests = {w.tree.digest("silu-kernel-v1") for w in (cpu, backend, other)}
    assert len(digests) == 3
    quick = replace(backend.tree.load("silu-kernel-v1"), claims=())
    assert quick.depends_on == ()


def test_evidence_counts_however_the_contract_was_named(backend, monkeypatch):
    """`isobit verify isobit` finds what `isobit verify silu-kernel-v1` has judged, in any folder."""
    monkeypatch.chdir(library())
    other = BackendWorkspace([Path()], backend.home, "interpreter", "sm_90")
    assert other.tree.entries["silu-kernel-v1"].path != backend.tree.entries["silu-kernel-v1"].path
    assert other.tree.digest("silu-kernel-v1") == backend.tree.digest("silu-kernel-v1")


def test_a_plan_is_in_the_digest_of_its_own_contract_alone(backend, monkeypatch):
    monkeypatch.setitem(PLANS, "silu-kernel-v1", Plan(sizes={"rows": {"n": (5,)}}))
    other = BackendWorkspace([library()], backend.home, "interpreter", "sm_90")
    assert other.tree.digest("silu-kernel-v1") != backend.tree.digest("silu-kernel-v1")
    assert other.tree.digest("gelu-kernel-v1") == backend.tree.digest("gelu-kernel-v1")


def test_the_command_names_backend_cases_and_what_does_not_apply(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["verify", "silu-kernel-v1", "--backend", "interpreter", "--seconds", "0", "-q"]
    assert main.main(words) == 2
    shown = " ".join(capsys.readouterr().out.split())
    for expected in (
        "not applicable, 1 claims (arguments are checked",
        "silu-kernel-v1/refusals",
        "Triton executors by interpreter, sm_90, judged up to L2 on",
        "not applicable: 1 claims",
    ):
        assert expected in shown
    for wrong in (["--jobs", "2"], ["--subject", "stock"], ["--thorough"]):
        assert main.main([*words[:4], *wrong, "-q"]) == 2


def test_contracts_without_an_executor_are_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["verify", "tree-collective-v1", "--backend", "interpreter"]) == 2
    assert "collectives move bytes" in capsys.readouterr().err


def test_several_processes_are_refused():
    with executing("interpreter"), pytest.raises(ArgumentError, match="one process"):
        run.refuse_processes(2)
    run.refuse_processes(2)


def test_a_changed_source_is_noticed():
    with (
        pytest.raises((AssertionError, ContractError), match="must be written again"),
        source("isobit.ops.silu.triton", ("not there", ""))(),
    ):
        pass
