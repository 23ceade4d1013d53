"""`isobit doctor --device cuda --record` writes one file, and `isobit doctor --read` takes it only as it was written.

The card is a stand-in: kernels run in the PTX machine, contracts and times on the CPU.
"""

import json

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from isobit.certifying.running import card, sass
from isobit.certifying.running.backends import MachineBackend, compiler_for, executing
from isobit.certifying.running.compile import specialise
from isobit.cli import main
from isobit.library.on_gpu import card_records, devices
from isobit.library.on_gpu.devices import Device

CODE = b"a cubin"
JUDGED = [
    {"contract": "silu-kernel-v1", "claim": claim, "verdict": "kept", "cases": 20}
    for claim in ("accuracy", "gradient")
]


@pytest.fixture
def keys(tmp_path):
    private = ed25519.Ed25519PrivateKey.generate()
    made = {
        "key": private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        "key.pub": private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return [str(tmp_path / name) for name in made]


@pytest.fixture
def stand_in(monkeypatch):
    """A card whose kernels have the machine code "ab", which is recorded for all of them."""
    facts = {"name": "a card", "how": "run on the card"}
    made = Device("cuda", torch.device("cpu"), "sm_90", False, facts)
    monkeypatch.setattr(devices, "find_device", lambda name: made)

    def run(kernel, grid, args, given):
        MachineBackend("sm_90").launch(kernel, grid, args, given, {})
        call = specialise(kernel, "sm_90", args, given)
        return {"ptx": compiler_for("sm_90").compile(kernel, call).ptx, "cubin": CODE}

    monkeypatch.setattr(card, "run_on_card", run)
    monkeypatch.setattr(card, "sass_digest", lambda cubin: "ab")
    known = {"code": "ab"}
    monkeypatch.setattr(card, "recorded", lambda *_: known["code"])
    monkeypatch.setattr("isobit.library.on_gpu.attesting.OPERATORS", ("silu",))
    monkeypatch.setattr(card_records, "RUNS", 2)
    times = card_records.time_forms
    monkeypatch.setattr(card_records, "time_forms", lambda place: times(place, 64))
    monkeypatch.setattr(card_records, "judge_contracts", lambda *_: JUDGED)
    return known


def test_one_file_has_everything(stand_in, keys, tmp_path, capsys):
    path = tmp_path / "card.json"
    assert (
        main.main(["doctor", "--device", "cuda", "--record", str(path), "--sign", keys[0], "-q"])
        == 0
    )
    assert "have the machine code that is recorded for them" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["contracts"] == JUDGED
    assert [one["stock"] for one in found["times"]] == [
        *["torch.mm"] * 3,
        *["SDPA"] * 2,
        "mm, log_softmax, gather",
    ]
    assert all(one["isobit_us"] > 0 and one["stock_us"] > 0 for one in found["times"]), found[
        "times"
    ]
    assert all(one["sass"] == one["recorded_sass"] == "ab" for one in found["kernels"])
    assert main.main(["doctor", "--read", str(path), "--key", keys[1]]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 attestations kept" in said
    assert "2 of 2 claims of contracts kept at L2, in 40 cases" in said
    assert "everything is kept" in said
    assert f"signed by key {found['signature']['key']}" in said


@pytest.mark.full
def test_contracts_are_judged_by_the_executors_of_the_backend():
    device = Device("cuda", torch.device("cpu"), "sm_90", False, {})
    with executing("interpreter", target="sm_90"):
        found = card_records.judge_contracts(device, ("silu-kernel-v1",), lambda _: None)
    assert card_records.contracts_kept(found), found
    assert len(found) > 5
    assert sum(one["cases"] for one in found) > 20


@pytest.fixture
def record(keys, tmp_path):
    """A signed record, as the command writes it."""
    kept = {"dtype": "float32", "engine": "chain", "kept": True, "checks": 1, "detail": "silu"}
    times = [
        {"form": "linear", "stock": "torch.mm", "isobit_us": 2.0, "stock_us": 1.0, "detail": ""}
    ]
    made = {"kept": True, "device": {"name": "a card"}, "operators": {"silu": [kept]}}
    made |= {"leaf": [], "kernels": [], "contracts": JUDGED, "times": times}
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card_records.seal(made, keys[0])))
    assert main.main(["doctor", "--read", str(path)]) == 0
    return path


def changed(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def resealed(found):
    found["digest"] = card_records.canonical(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(kept=False),
        lambda r: r["operators"]["silu"][0].update(detail="x"),
        lambda r: r["times"][0].update(isobit_us=1.0),
        lambda r: (r["device"].update(name="another card"), resealed(r)),
        lambda r: r.update(signature={"key": "00" * 32, "ed25519": "00" * 64}),
        lambda r: r.update(signature={"key": "zz", "ed25519": 3}),
        lambda r: r.update(signature="x"),
        lambda r: r.update(form=2),
        lambda r: r.clear(),
    ],
)
def test_a_changed_record_is_refused(record, capsys, change):
    changed(record, change)
    assert main.main(["doctor", "--read", str(record)]) == 2
    assert "remedy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "[" * 100_000, '{"form": 1}', '{"form": 1, "kept": 1}', "\0"]
)
def test_what_is_no_record_is_refused(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    assert main.main(["doctor", "--read", str(tmp_path / "x.json")]) == 2
    assert "remedy" in capsys.readouterr().err


def test_another_key_and_no_signature_are_refused(record, keys, tmp_path, capsys):
    path = str(record)
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    (tmp_path / "other.pub").write_bytes(
        other.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    assert main.main(["doctor", "--read", path, "--key", str(tmp_path / "other.pub")]) == 2
    changed(record, lambda r: r.pop("signature"))
    assert (
        main.main(["doctor", "--read", path]) == 0
    )  # the digest is right, and nobody asked for a key
    assert "not signed" in capsys.readouterr().out
    assert main.main(["doctor", "--read", path, "--key", keys[1]]) == 2


def test_other_machine_code_is_reported(stand_in, tmp_path, capsys):
    stand_in["code"] = "cd"
    words = [
        "doctor",
        "--device",
        "cuda",
        "--operators",
        "silu",
        "--record",
        str(tmp_path / "r.json"),
        "-q",
    ]
    assert main.main(words) == 0  # another ptxas is no fault: bits and texts are compared
    assert "other machine code: silu" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert "times" not in found
    assert {one["recorded_sass"] for one in found["kernels"]} == {"cd"}


def test_a_broken_claim_is_not_kept():
    kept = {"verdict": "kept", "cases": 3}
    assert card_records.contracts_kept([kept])
    assert not card_records.contracts_kept([])
    for verdict in ("broken", "vacuous", "could-not-run"):
        assert not card_records.contracts_kept([kept, {"verdict": verdict}])


@pytest.mark.parametrize(
    "words",
    [
        ["--sign", "key"],
        ["--key", "key"],
        ["--read", "x.json", "--device", "cuda"],
        ["--read", "missing.json"],
        ["--device", "sm_90", "--record", "r.json", "--sign", "missing"],
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["doctor", *words]) == 2
    assert "remedy" in capsys.readouterr().err


def test_counts_of_machine_code():
    code = "FFMA R1, R2, R3\nHMMA.16816.F32 R1\nFADD R1\nHFMA2 R1, -RZ, RZ"
    assert len(sass.ROUNDED.findall(code)) == 1
    assert sass.count(code, sass.MATRIX) == 1
    assert sass.digest_of(code) != sass.digest_of(code + "\n")
