"""`isobit reveal`: exit codes, records, files, and a user's own kernel."""

import json
from xml.etree import ElementTree

import pytest

from isobit.cli.main import main

KERNELS = '''
import torch
from isobit import targets

def mine(x):
    total = x[0]
    for value in x[1:]:
        total = total + value
    return total

def largest(x):
    return x.max()

def shaped(k, m, dtype):
    return targets.linear(k, m, dtype=dtype)

ready = targets.sum(24)

def broken(x):
    raise OSError("no such device")
'''


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    import sys

    sys.modules.pop("my_kernels", None)


def test_ours_is_one_order(capsys):
    assert main(["reveal", "linear", "--k", "512", "--m", "1,2,64", "--isobit"]) == 0
    out = capsys.readouterr().out
    assert "3 configurations, one order" in out
    assert "it is the defined order" in out


def test_stock_has_several(capsys, tmp_path):
    page, picture = tmp_path / "out.html", tmp_path / "out.svg"
    assert main(["reveal", "linear", "--k", "1024", "--m", "1,64,256", "--html", str(page), "--svg", str(picture)]) == 1
    assert "orders, 0 not shown" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    ElementTree.fromstring(picture.read_text())
    assert not [p for p in tmp_path.iterdir() if p not in (page, picture)]


def test_json(capsys):
    assert main(["reveal", "sum", "--k", "64", "--threads", "1,2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kept"] is True
    assert record["configurations"] == 2
    assert record["classes"][0]["configurations"] == ["threads=1", "threads=2"]
    assert record["classes"][0]["replayed"] == 8


def test_order_only(capsys):
    assert main(["reveal", "sum", "--k", "64", "--order-only"]) == 0
    assert "what its additions do was not seen" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mine", "ready"])
def test_a_users_kernel(kernels, name, capsys):
    assert main(["reveal", f"my_kernels:{name}", "--k", "24"]) == 0


def test_a_users_factory(kernels, capsys):
    assert main(["reveal", "my_kernels:shaped", "--k", "1024", "--m", "1,256"]) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["linaer"], "expected one of"),
        (["softmax", "--n", "3"], "leave --n out"),
        (["softmax", "--isobit"], "expected one of linear"),
        (["no_such_package:f"], "can be imported"),
        (["json:no_such_name"], "can be imported"),
        (["softmax", "--dtype", "bf16"], "hides its order"),
        (["linear", "--k", "0"], "n >= 1"),
        (["my_kernels:largest", "--k", "8"], "could not be shown"),
        (["my_kernels:broken", "--k", "8"], "no such device"),
    ],
)
def test_what_cannot_be_shown_exits_2(kernels, arguments, word, capsys):
    assert main(["reveal", *arguments]) == 2
    said = capsys.readouterr()
    assert word in " ".join((said.out + said.err).split())


@pytest.mark.parametrize("wrong", [["linear", "--m", "1,x"], ["linear", "--m", "0"], ["linear", "--dtype", "fp8"]])
def test_options_that_make_no_sense_exit_2(wrong):
    with pytest.raises(SystemExit) as stopped:
        main(["reveal", *wrong])
    assert stopped.value.code == 2
