"""The command: exit codes 0 kept, 1 broken, 2 could not run; JSON for machines; help for people."""

import json

import pytest
import torch

from isobit.cli import main
from isobit.foundation import native
from isobit.ops import dispatch
from isobit.ops.linear import attest

needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


@pytest.fixture
def fresh():
    """Attestation forgotten, before and after."""

    def forget():
        dispatch.attestations.cache_clear()
        dispatch.has_native.cache_clear()

    forget()
    yield
    forget()
    dispatch.has_native()


@needs_native
def test_doctor(capsys):
    assert main.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "native" in shown
    assert shown.count("kept") == 3


@needs_native
def test_doctor_json(capsys):
    assert main.main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["executor"] == "native"
    assert {a["dtype"]: a["kept"] for a in record["attestations"]} == dict.fromkeys(
        ("float32", "bfloat16", "float16"), True
    )
    assert record["machine"]["torch"] == torch.__version__
    assert "-ffp-contract=off" in record["machine"]["flags"]
    assert "fast-math" not in record["machine"]["flags"].replace("-fno-fast-math", "")
    assert "march" not in record["machine"]["flags"]


def test_doctor_without_kernels_says_why(capsys, fresh, monkeypatch):
    monkeypatch.setattr(native, "load", lambda: "not built: no compiler")
    assert main.main(["doctor"]) == 2
    shown = capsys.readouterr().out
    assert "not built: no compiler" in shown
    assert "portable" in shown
    assert "remedy" in shown
    import isobit

    assert isobit.linear(torch.ones(1, 3), torch.ones(2, 3)).tolist() == [[3.0, 3.0]]


@needs_native
def test_a_kernel_that_adds_otherwise_is_refused(capsys, fresh, monkeypatch):
    monkeypatch.setattr(attest, "expected_tree", lambda segments, engine: tuple(range(512)))
    assert main.main(["doctor"]) == 1
    assert "BROKEN" in capsys.readouterr().out
    assert not dispatch.is_native(torch.float32)
    with pytest.raises(RuntimeError, match="attested"):
        torch.ops.isobit.linear(torch.ones(1, 3), torch.ones(2, 3), None, None, None)


@needs_native
def test_values_are_attested_too(fresh, monkeypatch):
    monkeypatch.setattr(attest, "evaluate", lambda *_: 0.0)
    assert [a.kept for a in dispatch.attestations()] == [False] * 3
    assert all("values" in a.detail for a in dispatch.attestations())


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "doctor" in shown
    assert all(name in shown for names in main.GROUPS.values() for name in names)
    assert len(shown.splitlines()) <= 40
    assert not [old for old in main.OLD_NAMES if f"\n  {old} " in shown]
    for group, names in main.SUBCOMMANDS.items():
        with pytest.raises(SystemExit) as stop:
            main.main([group, "--help"])
        assert stop.value.code == 0
        assert all(f"\n    {name}" in capsys.readouterr().out for name in list(names)[:1])
    with pytest.raises(SystemExit) as stop:
        main.main(["nonsense"])
    assert stop.value.code == 2
