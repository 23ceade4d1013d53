"""training-stability-v1: it has the ids that it is made for, stock clipping breaks it, and runlog's causes are its own.

That it is kept and that every planted program is caught is judged with the library, in test_library.py.
"""

from dataclasses import replace
from pathlib import Path

from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.guards.run_log import rules
from isobit.guards.run_log import rules as schedule

CONTRACT = load_contract(library() / "training_stability" / "contract.yaml")
IDS = {
    *(f"C-{name}-001" for name in ("TRAINSTABLE", "EMBED-GRAD", "HYPERPARAMS", "GPUINIT")),
    *(f"C-{name}-001" for name in ("GRADFLOW", "TRAINCFG")),
    *(
        f"FALSIFY-{name}-001"
        for name in ("STABLE", "EMBEDGRAD", "HYPERPARAMS", "GPUINIT", "GRADFLOW")
    ),
    "FALSIFY-ALBOR-001",
    "FALSIFY-ALBOR-002",
}


def test_every_id_has_a_claim_with_plants_and_causes():
    assert {obligation.id for obligation in CONTRACT.obligations} == IDS
    assert {id for claim in CONTRACT.claims for id in claim.obligations} == IDS
    assert all(len(claim.sabotage) >= 2 and claim.if_fails for claim in CONTRACT.claims)


def test_stock_clipping_learns_nothing_from_large_gradients():
    """torch's norm of gradients of 1e33 is infinite in fp32, so that clipping makes them zero."""
    claims = [c for c in CONTRACT.claims if c.id in ("reads-clipped-gradients", "gradients-flow")]
    few = replace(CONTRACT, claims=tuple(replace(c, level="L2") for c in claims))
    found = {
        record.claim: record
        for record in verify_contract(few, Options(subject="stock-clipping", level=2))
    }
    assert found["reads-clipped-gradients"].verdict == "broken"
    assert "zero-gradient" in found["reads-clipped-gradients"].detail
    assert "its norm overflows" in found["reads-clipped-gradients"].if_fails
    assert found["gradients-flow"].verdict == "kept"  # gradients of usual size are fine


def test_the_claims_that_runlog_names_are_there():
    named = set()
    for module in (rules, schedule):
        text = Path(module.__file__).read_text()
        named |= {part.split('"')[0] for part in text.split('claim="')[1:]}
    assert named == {
        "stays-finite",
        "loss-falls",
        "norms-are-bounded",
        "rates-follow-the-configuration",
    }
    assert named <= {claim.id for claim in CONTRACT.claims if claim.if_fails}
