"""`isobit reveal`: exit codes, records, files, and a user's own kernel."""

import json
import re
from xml.etree import ElementTree

import pytest
import torch

import isobit
from isobit.cli.main import main

KERNELS = """
import torch
from isobit.reveal import targets

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

def nothing(x):
    return None

def leaves(x):
    raise SystemExit(7)

def k_named(k):
    print("hello")
    return k.sum()

number = 5

def bad_factory(k, m):
    raise OSError("factory")
"""

TAILED = """
import torch
from isobit.reveal import targets

def tailed(x, weight):
    products = [x[:, k : k + 1] * weight[:, k] for k in range(64)]
    there, back = products[0], products[-1]
    for k in range(1, 64):
        there, back = there + products[k], back + products[63 - k]
    return torch.cat([there[:, :30], back[:, 30:]], 1)

def target(k, m):
    return targets.linear(k, m, 40, function=tailed)
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    (tmp_path / "raises.py").write_text("raise RuntimeError('at import')")
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
    assert (
        main(
            [
                "reveal",
                "linear",
                "--k",
                "1024",
                "--m",
                "1,64,256",
                "--html",
                str(page),
                "--svg",
                str(picture),
            ]
        )
        == 1
    )
    assert "orders, 0 not shown" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    metadata = (
        ElementTree.fromstring(picture.read_text())
        .find("{http://www.w3.org/2000/svg}metadata")
        .text
    )
    for said in (
        "isobit reveal linear --k 1024",
        torch.__version__.partition("+")[0],
        isobit.__version__,
    ):
        assert said in page.read_text()
        assert said in metadata
    assert re.search(r"date: \d{4}-\d\d-\d\dT.*digest: [0-9a-f]{32}", metadata)
    assert not [p for p in tmp_path.iterdir() if p not in (page, picture)]


def test_json(capsys):
    assert main(["reveal", "sum", "--k", "64", "--threads", "1,2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kept"] is True
    assert record["provenance"]["command"] == "isobit reveal sum --k 64 --threads 1,2 --json"
    assert record["title"] == "stock sum, fp32, 64 terms"
    assert record["configurations"] == 2
    assert record["classes"][0]["configurations"] == ["threads=1", "threads=2"]
    assert record["classes"][0]["replayed"] >= 8


def test_what_a_kernel_prints_is_no_part_of_the_record(kernels, capsys):
    assert main(["reveal", "my_kernels:k_named", "--k", "12", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kept"] is True
    assert record["title"] == "my_kernels:k_named, fp32, 12 terms"  # a user's own is not stock


def test_places_that_add_otherwise_are_told(kernels, capsys):
    (kernels / "tailed.py").write_text(TAILED)
    assert main(["reveal", "tailed:target", "--k", "64", "--m", "1,2"]) == 1
    assert "10 places of a call add in another order still" in capsys.readouterr().out


def test_order_only(capsys):
    assert main(["reveal", "sum", "--k", "64", "--order-only"]) == 0
    assert "what its additions do was not probed" in capsys.readouterr().out


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
        (["my_kernels:nothing", "--k", "8"], "returned NoneType"),
        (["my_kernels:leaves", "--k", "8"], "SystemExit"),
        (["my_kernels:number", "--k", "8"], "a int"),
        (["my_kernels:bad_factory", "--m", "2"], "OSError: factory"),
        (["my_kernels:mine", "--m", "2"], "leave --m out"),
        (["raises:x"], "RuntimeError: at import"),
        ([":x"], "can be imported"),
        (["my_kernels:mine", "--isobit"], "isobit's own sums"),
        (["all_reduce", "--dtype", "bf16"], "--ranks and --elements alone"),
        (["linear", "--k", "-3"], "n >= 1"),
        (["linear", "--n", "0"], "at least one column"),
        (["linear", "--row", "5"], "a row from 0 to 0"),
        (["sum", "--html", "/nonexistent/x.html"], "a folder that exists"),
    ],
)
def test_what_cannot_be_shown_exits_2(kernels, arguments, word, capsys):
    assert main(["reveal", *arguments]) == 2
    said = capsys.readouterr()
    assert word in " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    "wrong", [["linear", "--m", "1,x"], ["linear", "--m", "0"], ["linear", "--dtype", "fp8"]]
)
def test_options_that_make_no_sense_exit_2(wrong):
    with pytest.raises(SystemExit) as stopped:
        main(["reveal", *wrong])
    assert stopped.value.code == 2
