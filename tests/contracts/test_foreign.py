"""Contracts that others wrote in prose load or are refused precisely; in our form every word stays and none passes."""

from pathlib import Path

import pytest

from isobit.contracts.foreign import is_executable, quote, read_foreign, to_ours
from isobit.contracts.language.load import parse_contract
from isobit.contracts.language.yaml_text import read_yaml
from isobit.contracts.store.ladder import contract_level, contract_verdict, unlinked
from isobit.errors import ContractError

# Beside the checkout, where there is one; never part of the project.
DATA = Path(__file__).parents[3] / "shared" / "data"
FOLDERS = {"pv-contracts": 87, "albor-contracts": 53, "albor-falsify": 3}

SAMPLE = """
metadata:
  version: "1.2.0"
  description: "Halving: exact, and undone by doubling"
  references: ["A note on halves"]
  depends_on: [doubling-v1, doubling-v1]
equations:
  half:
    formula: "h(x) = x / 2"
    domain: "x is finite"
    invariants: ["h(0) = 0"]
proof_obligations:
  - {type: invariant, property: "Halving zero gives zero", formal: "h(0) = 0", tolerance: 0, applies_to: half,
     lean: {theorem: Half.zero, status: proved}}
  - {type: equivalence, property: "Doubling undoes it", id: HALF-001}
falsification_tests:
  - {id: FALSIFY-HALF-001, rule: "Zero", prediction: "zero stays", test: "try zero", if_fails: "a wrong constant"}
  - {id: FALSIFY-HALF-002, rule: "Way back", prediction: "x again", test: "pytest tests/half.py -k back",
     if_fails: "a rounding", obligation: HALF-001}
kani_harnesses:
  - {id: KANI-HALF-001, obligation: HALF-001, bound: 8, strategy: stub_float, harness: verify_half}
qa_gate: {id: F-HALF, name: Halves}
"""


def test_a_sample_is_read_whole():
    found = read_foreign(SAMPLE, "somewhere/half-v1.yaml")
    assert (found.id, found.version, found.title) == (
        "half-v1",
        "1.2.0",
        "Halving: exact, and undone by doubling",
    )
    assert found.equations["half"].domain == "x is finite"
    assert found.invariants["half"] == ("h(0) = 0",)
    # A made id steps aside for the file's own.
    assert [o.id for o in found.obligations] == ["HALF-002", "HALF-001"]
    assert (found.obligations[0].formal, found.obligations[0].tolerance) == ("h(0) = 0", "0")
    assert [t.executable for t in found.tests] == [False, True]
    assert found.executable == 1
    assert found.harnesses[0].text == "verify_half"


def test_proved_counts_for_nothing():
    assert "status: proved" in SAMPLE
    unlinked_test = SAMPLE.replace(", obligation: HALF-001}\nkani", "}\nkani")
    assert unlinked_test != SAMPLE
    assert (
        read_foreign(unlinked_test, "half-v1.yaml").executable == 0
    )  # a command that names no obligation


def test_in_our_form_all_is_kept_and_nothing_passes():
    text = to_ours(read_foreign(SAMPLE, "half-v1.yaml"))
    contract = parse_contract(text, "half-v1")
    assert contract.depends_on == ("doubling-v1",)
    assert contract.obligations[0].equation == "half"
    for said in (
        "Halving zero gives zero",
        "try zero",
        "verify_half",
        "A note on halves",
        "h(0) = 0",
        "tolerance 0",
    ):
        assert said in text
    assert "proved" not in text
    assert contract.claims == ()
    assert unlinked(contract) == ("HALF-002", "HALF-001")
    assert (contract_verdict(contract, ()), contract_level(contract, ())) == ("unbound", 0)


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (("proof_obligations:", "proof_obligation:"), 12, "did you mean 'proof_obligations'?"),
        (('property: "Doubling', 'propperty: "Doubling'), 15, "did you mean 'property'?"),
        (('version: "1.2.0"', "version: two"), 3, "a version as 1.0.0"),
        (("  references:", "  version: 2\n  references:"), 5, "'version' twice"),
        (("half:\n", "half: &a\n"), 8, "no anchors"),
        (("id: KANI-HALF-001", "id: !!python/name:os.system x"), 21, "no tags"),
        (
            ("id: HALF-001}", "id: HALF-001}\n  - {type: a, property: b, id: HALF-001}"),
            2,
            "each obligation id once",
        ),
    ],
)
def test_refused_with_line_and_reason(change, line, said):
    assert change[0] in SAMPLE
    with pytest.raises(ContractError) as caught:
        read_foreign(SAMPLE.replace(*change, 1), "half-v1.yaml")
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"half-v1.yaml:{line}: ")


@pytest.mark.parametrize(
    "text",
    ["", "- a\n- b\n", "just words", "tests: []", "metadata: {version: 1.0.0, description: d}"],
)
def test_other_shapes_are_refused(text):
    with pytest.raises(ContractError):
        read_foreign(text, "half-v1.yaml")


@pytest.mark.parametrize(
    ("text", "executable"),
    [
        ("cargo test half", True),
        ("# why\npython3 tools/half.py\n  --rows 3\n", True),
        ("./run.sh --all", True),
        ("cargo test \\\nhalf", True),
        ("cargo test\n  half" * 2 + "\n x" * 100_000, True),
        ("halves.check:zero", True),
        ("tests/half.py::test_zero", True),
        ("halves::tests::zero", True),
        ("property test with 10000 vectors", False),
        ("python", False),
        ("cargo test <name>", False),
        ("apr eval ${MODEL}", False),
        ("cargo test half\nand look at the output", False),
        ("Run: cargo test half", False),
        ("python don't", False),
        ("# cargo test half", False),
        ("", False),
    ],
)
def test_what_counts_as_executable(text, executable):
    assert is_executable(text) is executable


@pytest.mark.parametrize(
    "text",
    ["a\x7fb", "a\u2028b", "a\x85b", "\ufeff", "\x00\x1f", '🙂 \\ "', "a: b # c", "\ud800", "a\nb"],
)
def test_quoted_text_reads_back(text):
    try:
        assert read_yaml(f"x: {quote(text)}", "x").plain() == {"x": text}
    except ContractError:
        assert text == "\ud800"  # half a character, which no YAML holds


@pytest.mark.skipif(
    not DATA.is_dir(), reason="the contracts of others are not beside this checkout"
)
def test_every_contract_of_others_loads_and_becomes_ours():
    files = sorted(path for folder in FOLDERS for path in (DATA / folder).glob("*.yaml"))
    assert len(files) == sum(FOLDERS.values())
    obligations = executable = 0
    for path in files:
        foreign = read_foreign(path.read_text(encoding="utf-8"), str(path))
        contract = parse_contract(to_ours(foreign), foreign.id)
        assert [o.id for o in contract.obligations] == [o.id for o in foreign.obligations]
        assert all(
            o.text in written.text
            for o, written in zip(foreign.obligations, contract.obligations, strict=True)
        )
        assert contract_verdict(contract, ()) == "unbound"
        obligations += len(foreign.obligations)
        executable += foreign.executable
    # As measured: seven scripts are command lines; everything else is prose.
    assert (obligations, executable) == (731, 7)
