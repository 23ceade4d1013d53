"""Names of the last release do what the new names do: same exit code, same output, and one line of warning."""

import json
import re

import pytest
import torch

from isobit.cli import main

CONTRACT = """\
id: halved-v1
version: "1"
title: "x"
"""
RECORD = {"id": "a", "token_ids": [1, 2], "logprobs": [-0.5, -1.5]}
# old words -> new words, and the exit code of both; {tmp} is a folder with the files below.
PAIRS = {
    "bits {tmp}/a.pt {tmp}/b.pt -q": ("compare checkpoints {tmp}/a.pt {tmp}/b.pt -q", 1),
    "bits {tmp}/a.pt {tmp}/a.pt -q": ("compare checkpoints {tmp}/a.pt {tmp}/a.pt -q", 0),
    "bits {tmp}/a.pt {tmp}/none.pt -q": ("compare checkpoints {tmp}/a.pt {tmp}/none.pt -q", 2),
    "twice {tmp}/train.py --steps 1 --no-causes -q": (
        "compare runs {tmp}/train.py --steps 1 --no-causes -q",
        0,
    ),
    "twice {tmp}/none.py -q -- --lr 1": ("compare runs {tmp}/none.py -q -- --lr 1", 2),
    "rollout compare {tmp}/r.jsonl {tmp}/r.jsonl": (
        "compare rollouts {tmp}/r.jsonl {tmp}/r.jsonl",
        0,
    ),
    "rollout --limit 1 compare {tmp}/r.jsonl {tmp}/t.jsonl": (
        "compare rollouts --limit 1 {tmp}/r.jsonl {tmp}/t.jsonl",
        1,
    ),
    "audit --dumps {tmp}/da {tmp}/db -q": ("compare dumps {tmp}/da {tmp}/db -q", 1),
    "audit -q --dumps {tmp}/da {tmp}/da --rows common": (
        "compare dumps -q {tmp}/da {tmp}/da --rows common",
        0,
    ),
    "audit --server http://127.0.0.1:9 -q": ("compare server http://127.0.0.1:9 -q", 2),
    "audit --server=http://127.0.0.1:9 --model m -q": (
        "compare server http://127.0.0.1:9 --model m -q",
        2,
    ),
    "chain --model none.py:f -q": ("gate model --model none.py:f -q", 2),
    "chain --model qwen3-micro --no-stock -q": ("gate model --model qwen3-micro --no-stock -q", 0),
    "curve --workload tiny --layouts 1x1x1 2x1x1 -q": (
        "gate training --workload tiny --layouts 1x1x1 2x1x1 -q",
        0,
    ),
    "curve --layouts nothing -q": ("gate training --layouts nothing -q", 2),
    "status softmax-kernel-v1": ("contract status softmax-kernel-v1", 2),
    "status {tmp}/broken.contract.yaml": ("contract status {tmp}/broken.contract.yaml", 1),
    "explain softmax-kernel-v1": ("contract explain softmax-kernel-v1", 0),
    "explain none-v1": ("contract explain none-v1", 2),
    "lint {tmp}/broken.contract.yaml": ("contract lint {tmp}/broken.contract.yaml", 1),
    "graph softmax-kernel-v1": ("contract graph softmax-kernel-v1", 0),
    "new made-v1 --from none:f": ("contract new made-v1 --from none:f", 2),
    "replay softmax-kernel-v1/none": ("contract replay softmax-kernel-v1/none", 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("old")
    torch.save({"w": torch.zeros(2)}, here / "a.pt")
    torch.save({"w": torch.ones(2)}, here / "b.pt")
    for name, value in (("da", 1.0), ("db", 2.0)):
        (here / name).mkdir()
        torch.save(torch.tensor([value]), here / name / "x.pt")
    (here / "r.jsonl").write_text(json.dumps(RECORD) + "\n")
    (here / "t.jsonl").write_text(json.dumps({**RECORD, "logprobs": [-0.5, -1.25]}) + "\n")
    (here / "broken.contract.yaml").write_text(CONTRACT)
    (here / "train.py").write_text(
        "import torch\n"
        "w = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([w], lr=0.1)\n"
        "w.sum().backward()\n"
        "optimizer.step()\n"
    )
    return here


def run(words, folder, capsys):
    """Return exit code, output without what a clock measures, and the error stream."""
    capsys.readouterr()
    try:
        code = main.main(words.format(tmp=folder).split())
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    return code, re.sub(r"\b\d+\.\d (?:s|│)|\d+% of their time", "", said.out), said.err


LONG = ("twice {tmp}/train.py", "chain --model qwen3-micro", "curve --workload tiny")


@pytest.mark.parametrize(
    "old", [pytest.param(old, marks=[pytest.mark.full] * old.startswith(LONG)) for old in PAIRS]
)
def test_an_old_name_does_what_the_new_one_does(old, folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(old, folder, capsys)
    words, expected = PAIRS[old]
    new_code, new_out, new_err = run(words, folder, capsys)
    assert (code, out) == (new_code, new_out)
    assert code == expected, new_err
    warning, _, rest = err.partition("\n")
    new = " ".join(words.split()[:2])
    assert warning.startswith(f"isobit: warning: `isobit {old.split()[0]}")
    assert warning.endswith(
        f"is now `isobit {new}`; the old name will be removed in the next release"
    )
    assert rest == new_err
    assert "warning: `isobit" not in new_err


def test_every_old_name_is_tried():
    tried = {old.split()[0] for old in PAIRS}
    assert tried == {*main.OLD_NAMES, "audit"}


@pytest.mark.parametrize("old", [*main.OLD_NAMES])
def test_help_of_an_old_name_is_that_of_the_new_one(old, capsys):
    shown = []
    for words in ([old], main.OLD_NAMES[old].split()):
        with pytest.raises(SystemExit) as stopped:
            main.main([*words, "--help"])
        assert stopped.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert f"usage: isobit {main.OLD_NAMES[old]} " in shown[0]


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "x.py", "--", "--dumps", "a"],
        ["audit", "x.py", "--", "--dumps", "a", "b"],
        ["audit", "x.py", "--", "--server", "u"],
        ["doctor"],
        [],
        ["--dumps"],
        ["compare", "bits"],
    ],
)
def test_what_is_no_old_name_is_left_alone(words, capsys):
    """Arguments after -- are a script's: they may have any name."""
    assert main.with_new_names(list(words)) == words
    assert capsys.readouterr().err == ""
