"""Theorem: a file of evidence that is damaged, forged or hostile does not count, is named, and stops nobody."""

import json
import os
from pathlib import Path

import pytest
from blake3 import blake3

from isobit.contracts.store.evidence import Evidence, chain
from isobit.foundation.records import Planted, Proof
from isobit.order.plan import VERSION
from tests.contracts.evidence_made import CONTRACT, DIGEST, PLANTED, finding, read, record


def spoil(data: bytes, how: str) -> bytes:
    first, second, third = data.removesuffix(b"\n").split(b"\n")
    changed = {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "record missing": first + b"\n" + second + b"\n",
        "first record missing": first + b"\n" + third + b"\n",
        "records exchanged": first + b"\n" + third + b"\n" + second + b"\n",
        "record twice": data + third + b"\n",
        "no record": first + b"\n",
        "one bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "verdict changed": data.replace(b'"broken"', b'"kept"'),
        "another machine": data.replace(b"avx2", b"avx9"),
        "not JSON": b"\xff\xfe",
        "other digest": data.replace(DIGEST.encode(), b"f" * 32),
        "a list": b"[]\n",
        "a number": b"5\n",
        "deep": b"[" * 200_000 + b"]" * 200_000 + b"\n",
        "a large number": data.replace(b'"cases": 7', b'"cases": ' + b"7" * 5000),
    }
    return changed[how]


SPOILT = (
    "empty",
    "cut",
    "record missing",
    "first record missing",
    "records exchanged",
    "record twice",
    "no record",
    "one bit",
    "verdict changed",
    "another machine",
    "not JSON",
    "other digest",
    "a list",
    "a number",
    "deep",
    "a large number",
)


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("how", SPOILT)
def test_damaged_files_do_not_count_and_are_named(tmp_path, how, renamed):
    """Also where the file has been renamed to fit its new last line: then the chain inside shows it."""
    evidence = Evidence(tmp_path)
    evidence.write(finding())
    bad = evidence.write(finding(record(verdict="broken", level=1), record("other", "broken", 1)))
    data = spoil(bad.read_bytes(), how)
    bad.unlink()
    if renamed:
        last = data.removesuffix(b"\n").split(b"\n")[-1]
        bad = bad.with_name(f"{DIGEST}-{blake3(last).hexdigest()[:32]}.jsonl")
    bad.write_bytes(data)
    found, refused = read(tmp_path)
    assert (len(found), list(refused)) == (1, [str(bad)])


def forge(home: Path, change) -> Path:
    """A chain and a name that fit, over lines that `change` has edited: what anyone who can write files can make."""
    lines = [json.loads(line) for line in chain(finding(record(), record("proved", level=4)))]
    change(lines)
    data = [json.dumps(lines[0]).encode()]
    for line in lines[1:]:
        data.append(json.dumps({**line, "previous": blake3(data[-1]).hexdigest()}).encode())
    folder = home / "evidence" / DIGEST[:2]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{DIGEST}-{blake3(data[-1]).hexdigest()[:32]}.jsonl"
    path.write_bytes(b"\n".join(data) + b"\n")
    return path


def at(line: int, **changes):
    return lambda lines: lines[line].update(changes)


FALSE = {
    "level 9": at(1, level=9),
    "a level in the header": at(0, level=4, verdict="kept"),
    "unknown verdict": at(1, verdict="splendid"),
    "waived by itself": at(1, verdict="waived"),
    "kept though some differ": at(1, differing=3),
    "kept though nothing was compared": at(1, compared=0),
    "kept in no case": at(1, cases=0),
    "kept though a plant passed": at(1, planted=[{"name": PLANTED, "caught": False, "detail": ""}]),
    "negative count": at(1, inputs=-1),
    "count NaN": at(1, drawn=float("nan")),
    "count infinite": at(1, drawn=float("inf")),
    "count a truth": at(1, cases=True),
    "count a text": at(1, cases="7"),
    "count too large": at(1, cases=2**70),
    "seconds NaN": at(1, seconds=float("nan")),
    "planted a number": at(1, planted=5),
    "planted nothing but names": at(1, planted=[PLANTED]),
    "caught a text": at(1, planted=[{"name": PLANTED, "caught": "yes", "detail": ""}]),
    "proof a list": at(2, proof=[1]),
    "proof of too many words": at(
        2, proof={"engine": "z3", "covers": "", "cases": 1, "failure": "", "more": 1}
    ),
    "detail a number": at(1, detail=5),
    "another relation": at(1, relation="refuses"),
    "a claim that the contract has not": at(1, claim="elsewhere"),
    "a claim twice": at(1, claim="proved", relation="algebra"),
    "asked a text": at(0, asked="L4"),
    "fewer records than were made": lambda lines: lines.pop(),
    "asked NaN": at(0, asked=float("nan")),
    "reached a list": at(0, reached=["a"]),
    "reached a device": at(0, reached={"/dev/zero": "0" * 64}),
    "reached through a null byte": at(0, reached={"a\0b": "0" * 64}),
    "another contract": at(0, contract="matmul-kernel-v1"),
    "a later form": at(0, form=4),
    "another field": at(0, extra=1),
    "a record that is a list": lambda lines: lines.__setitem__(1, {}),
}


@pytest.mark.parametrize("how", FALSE)
def test_what_contradicts_itself_does_not_count_whatever_its_name(tmp_path, how):
    forge(tmp_path, lambda lines: None)
    assert len(read(tmp_path)[0]) == 1  # unchanged, it would
    path = forge(tmp_path, FALSE[how])
    found, refused = read(tmp_path)
    assert (len(found), list(refused)) == (1, [str(path)])
    assert refused[str(path)]


DOUBLED = {
    "a verdict twice": (1, b'"verdict": "kept"', b'"verdict": "broken", "verdict": "kept"'),
    "a count twice": (1, b'"cases": 7', b'"cases": 0, "cases": 7'),
    "a digest twice": (0, b'"digest": "', b'"digest": "0", "digest": "'),
    "a plant caught twice": (1, b'"caught": true', b'"caught": false, "caught": true'),
}


@pytest.mark.parametrize("how", DOUBLED)
def test_names_that_occur_twice_do_not_count(tmp_path, how):
    """The last value is well-formed, and the chain and the name fit; another reader would take the first."""
    at, once, twice = DOUBLED[how]
    lines = chain(finding(record()))
    assert once in lines[at]
    lines[at] = lines[at].replace(once, twice, 1)
    before = json.loads(lines[1])["previous"].encode()
    lines[1] = lines[1].replace(before, blake3(lines[0]).hexdigest().encode())
    path = (
        tmp_path / "evidence" / DIGEST[:2] / f"{DIGEST}-{blake3(lines[1]).hexdigest()[:32]}.jsonl"
    )
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    found, refused = read(tmp_path)
    assert found == []
    assert "occurs twice" in refused[str(path)]


def test_evidence_of_the_older_form_is_recognised_and_does_not_count(tmp_path):
    header = {
        "contract": CONTRACT.id,
        "digest": DIGEST,
        "subject": "",
        "asked": 4,
        "level": 4,
        "verdict": "kept",
    }
    header |= {"date": "2027-01-01", "engine": "x86_64", "ran": True, "records": 0}
    text = json.dumps(header) + "\n"
    folder = tmp_path / "evidence" / DIGEST[:2]
    folder.mkdir(parents=True)
    path = folder / f"{DIGEST}-{blake3(text.encode()).hexdigest()[:32]}.jsonl"
    path.write_text(text)
    assert read(tmp_path) == ([], {str(path): "it is of an older form"})


@pytest.mark.parametrize("order", [1, VERSION + 1, float(VERSION), None])
def test_evidence_of_another_order_is_recognised_and_does_not_count(tmp_path, order):
    store = Evidence(tmp_path)
    written = store.write(finding(record()))
    assert len(read(tmp_path)[0]) == 1
    header, *rest = [json.loads(line) for line in written.read_text().splitlines()]
    assert header["order"] == VERSION
    written.unlink()
    if order == 1:  # version 1 was written in form 2, which had no version of the order
        header["form"] = 2
        del header["order"]
    else:
        header["order"] = order
    lines = [json.dumps(header)]
    for line in rest:
        lines.append(json.dumps(line | {"previous": blake3(lines[-1].encode()).hexdigest()}))
    path = written.with_name(f"{DIGEST}-{blake3(lines[-1].encode()).hexdigest()[:32]}.jsonl")
    path.write_text("\n".join(lines) + "\n")
    found, refused = read(tmp_path)
    assert found == []
    assert f"under version {order!r} of the order" in refused[str(path)]
    assert refused[str(path)].endswith(f"this is version {VERSION}: judge again with isobit verify")


def test_what_is_no_plain_file_neither_counts_nor_blocks(tmp_path):
    evidence = Evidence(tmp_path)
    good = evidence.write(finding())
    names = [good.with_name(f"{DIGEST}-{n * 32}.jsonl") for n in "abcde"]
    names[0].symlink_to(good)
    names[1].symlink_to("/dev/zero")
    names[2].symlink_to(names[2])
    os.mkfifo(names[3])
    names[4].mkdir()
    (tmp_path / "evidence" / "zz").symlink_to(tmp_path / "evidence")
    found, refused = read(tmp_path)
    assert len(found) == 1
    assert sorted(refused) == [str(name) for name in names]


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    evidence = Evidence(tmp_path)
    path = evidence.write(finding())
    os.truncate(path, 1 << 40)  # sparse
    assert read(tmp_path) == ([], {str(path): "it is too large"})


LEVELS = {
    "all": ({}, 3),
    "too few drawn": ({"drawn": 9_999}, 2),
    "none drawn": ({"drawn": 0}, 2),
    "nothing planted": ({"planted": ()}, 1),
    "something else planted": ({"planted": (Planted("another", True, ""),)}, 1),
    "a proof that the claim does not have": ({"proof": Proof("z3", "all", 3)}, 3),
}


@pytest.mark.parametrize("how", LEVELS)
def test_levels_are_computed_from_what_was_counted(tmp_path, how):
    changes, level = LEVELS[how]
    Evidence(tmp_path).write(finding(record(**changes)))
    ((found,), _) = read(tmp_path)
    assert (found.records[0].level, found.records[0].required) == (level, 3)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, 4),
        ({"proof": None}, 3),
        ({"proof": Proof("z3", "all", 0)}, 3),
        ({"proof": Proof("z3", "all", 3, "k = 5")}, 3),
        ({"planted": (Planted(PLANTED, True, ""),)}, 3),
        ({"drawn": 5}, 2),
    ],
)
def test_a_proof_counts_with_what_it_refused_and_what_was_drawn_before(tmp_path, changes, level):
    Evidence(tmp_path).write(finding(record("proved", level=4, **changes)))
    assert read(tmp_path)[0][0].records[0].level == level
