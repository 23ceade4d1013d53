"""Theorem: where a signature is required, only what the holder of the key judged counts; no cache or copy helps.

Without one, whoever can write to the folder can write evidence: that is what signatures are for.
"""

import json

import pytest
from blake3 import blake3

from isobit.cli import main
from isobit.contracts.store.evidence import Evidence, JudgedContract
from isobit.contracts.workspace import Workspace
from isobit.foundation.records import ClaimRecord, Planted
from tests.attacks.judged_place import CONTRACT, PLANTED, places


@pytest.fixture
def place(tmp_path, monkeypatch):
    return places(tmp_path, monkeypatch)


def keys(folder, name):
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    plain = forms.NoEncryption()
    if name == "ssh":
        secret = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, plain)
        public = private.public_key().public_bytes(
            forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH
        )
    else:
        secret = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, plain)
        public = private.public_key().public_bytes(
            forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo
        )
    (folder / name).write_bytes(secret)
    (folder / f"{name}.pub").write_bytes(public)
    return str(folder / name), str(folder / f"{name}.pub")


def forged(here) -> None:
    """A file that is well-formed in every respect, for a subject that nobody has judged."""
    workspace = Workspace([here.path])
    (entry,) = workspace.choose([])
    planted = tuple(Planted(f"{name}, under batch", True, "") for name in PLANTED)
    record = ClaimRecord("c", "invariant", "kept", 2, 2, 2, 24, 192, planted=planted)
    Evidence(here.path / ".isobit").write(
        JudgedContract(entry.id, workspace.tree.digest(entry.id), "", 2, (record,))
    )


@pytest.mark.parametrize("form", ["ssh", "pem"])
def test_only_what_the_key_signed_counts_where_a_signature_is_required(
    place, tmp_path, form, capsys
):
    secret, public = keys(tmp_path, form)
    here = place("wrong")
    forged(here)
    # The limit that signatures are for: whoever can write to the folder can write evidence.
    assert main.main(["contract", "status"]) == 0
    assert main.main(["contract", "status", "--require-signature", public]) == 2
    said = capsys.readouterr().out
    assert (
        f"it is not signed by the required key: \n{here.evidence()[0].relative_to(tmp_path)}"
        in said
    )
    assert here.verify("--sign", secret) == 1  # judged, not believed
    assert main.main(["contract", "status", "--require-signature", public]) == 1
    capsys.readouterr()


def test_signed_evidence_counts_and_signing_again_judges_nothing(place, tmp_path, capsys):
    secret, public = keys(tmp_path, "pem")
    _, other = keys(tmp_path, "other")
    here = place("right")
    assert here.verify() == 0
    assert main.main(["contract", "status", "--require-signature", public]) == 2
    assert here.verify("--sign", secret) == 0
    assert "1 judged now" in capsys.readouterr().out.splitlines()[-1]
    assert here.verify("--sign", secret) == 0
    assert "0 judged now" in capsys.readouterr().out
    assert main.main(["contract", "status", "--require-signature", public]) == 0
    assert main.main(["contract", "status", "--require-signature", other]) == 2
    assert (
        main.main(
            ["contract", "status", "--require-signature", other, "--require-signature", public]
        )
        == 0
    )
    capsys.readouterr()


def test_a_signature_of_one_file_is_none_of_another(place, tmp_path, capsys):
    secret, public = keys(tmp_path, "pem")
    here = place("right")
    assert here.verify("--sign", secret) == 0
    (signature,) = tmp_path.glob(".isobit/evidence/*/*.sig")
    (signed,) = here.evidence()
    forged(here)
    (false,) = [file for file in here.evidence() if file != signed]
    signed.unlink()
    signature.rename(false.with_name(signature.name.replace(signed.name, false.name)))
    for text in (None, "", "00" * 64, "zz", "\xff" * 500):
        if text is not None:
            next(tmp_path.glob(".isobit/evidence/*/*.sig")).write_text(text)
        assert main.main(["contract", "status", "--require-signature", public]) == 2
        reason = (
            "it is not signed by the required key"
            if text == "\xff" * 500
            else "its signature is false"
        )
        assert reason in capsys.readouterr().out


def test_a_cache_that_came_with_evidence_is_not_believed_where_a_signature_is_required(
    place, tmp_path, capsys
):
    here = place("right")
    text = CONTRACT.format(name=here.name, subject="right", level="L2").replace(
        "claims:", "claims:\n  # more\n "
    )
    more = "\n - {id: d, obligations: [O-1], level: L2, relation: invariant, under: [threads], inputs: one}"
    here.contract.write_text(
        text.replace("[{id: c", "\n - {id: c").replace("inputs: one}]", "inputs: one}" + more)
    )
    (tmp_path / ".isobit").mkdir(exist_ok=True)
    Workspace([tmp_path])  # caches the facts of the new text
    facts = tmp_path / ".isobit" / "facts.json"
    cached = json.loads(facts.read_text())
    digest = blake3(here.contract.read_bytes()).hexdigest()[:32]
    assert [rung[0] for rung in cached["facts"][digest]["rungs"]] == ["c", "d"]
    cached["facts"][digest]["rungs"].pop()
    cached["facts"][digest]["claims"] = 1
    facts.write_text(json.dumps(cached))
    assert len(Workspace([tmp_path]).choose([])[0].rungs) == 1
    workspace = Workspace([tmp_path])
    workspace.require([])
    assert len(workspace.choose([])[0].rungs) == 2
    capsys.readouterr()


def test_keys_that_are_none_are_named(place, tmp_path, capsys):
    place("right")
    (tmp_path / "text").write_text("no key")
    for words in (
        ["contract", "status", "--require-signature", "text"],
        ["verify", "--sign", "text"],
        ["verify", "--sign", "gone"],
    ):
        assert main.main(words) == 2
        said = capsys.readouterr().err
        assert "Ed25519" in said
        assert "ssh-keygen" in said


@pytest.mark.parametrize("text", ["", "[]", '{"form": 5}', "\x00", "[" * 100_000])
def test_a_spoilt_cache_is_read_anew(place, tmp_path, text, capsys):
    place("right")
    (tmp_path / ".isobit").mkdir()
    (tmp_path / ".isobit" / "facts.json").write_text(text)
    assert main.main(["contract", "status"]) == 2
    capsys.readouterr()


def test_cached_facts_of_other_types_are_read_anew(place, tmp_path):
    place("right")
    (tmp_path / ".isobit").mkdir()
    Workspace([tmp_path])
    facts = tmp_path / ".isobit" / "facts.json"
    cached = json.loads(facts.read_text())
    for odd in (
        5,
        [],
        {},
        {"id": 5},
        {"rungs": [[]]},
        {"rungs": 5},
        {"claims": "9"},
        {"promised": [5]},
    ):
        known = {
            digest: {**found, **odd} if isinstance(odd, dict) and odd else odd
            for digest, found in cached["facts"].items()
        }
        facts.write_text(json.dumps({**cached, "facts": known}))
        workspace = Workspace([tmp_path])
        assert [workspace.status(entry).verdict for entry in workspace.choose([])] == ["not-judged"]
