"""`isobit families` names each part of a type, or the first that is not known; it loads no weights."""

import json

import pytest

from isobit.cli.main import main


def test_the_parts_of_known_types(capsys):
    assert main(["families", "mistral", "gemma3_text", "--json"]) == 0
    mistral, gemma = json.loads(capsys.readouterr().out)["types"]
    found = {row["part"]: row["found"] for row in mistral["rows"]}
    assert mistral["known"]
    assert not mistral["missing"]
    assert found["head"].startswith("plain")
    assert "by halves" in found["attention"]
    assert {"linear", "norm", "gated MLP", "rotary embedding", "layer", "backbone"} <= set(found)
    assert any(row["part"] == "gelu" for row in gemma["rows"])


def test_a_table_for_readers(capsys):
    assert main(["families", "granite"]) == 0
    said = capsys.readouterr().out
    assert "granite: GraniteForCausalLM: all parts known" in said
    assert "divided" in said


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("granitemoe", "GraniteMoe"), ("gpt2", "GPT2LMHeadModel")],
)
def test_what_is_not_known_is_named(kind, missing, capsys):
    assert main(["families", kind]) == 1
    assert missing in capsys.readouterr().out


def test_a_type_that_is_none(capsys):
    assert main(["families", "mistrall"]) == 2
    assert "mistral" in capsys.readouterr().err


@pytest.mark.full
def test_all_types_are_listed(capsys):
    assert main(["families", "--json"]) == 0
    found = {one["type"]: one["known"] for one in json.loads(capsys.readouterr().out)["types"]}
    from benchmarks.families import TYPES

    assert len(found) > 100
    assert all(found[kind] for kind in TYPES)
