"""Theorem: `isobit check` judges Triton kernels without a GPU, by their compiled code, and says how.

1. Right kernels are kept, forward and backward, also autotuned ones.
2. A kernel whose order follows the number of rows, whose configurations have different bits, which forgets strides or
   leaves its buffers is rejected by the claim that is there for it.
3. TRITON_INTERPRET changes nothing but a line of the output.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from isobit.cli import main
from isobit.errors import ArgumentError
from isobit.library.any_kernel.kernel_call import sizes_in_words, with_few_sizes, with_given_sizes
from isobit.library.any_kernel.kernel_judging import chosen
from isobit.library.any_kernel.signatures import LIKE

FILE = str(Path(__file__).with_name("triton_kernels_of_users.py"))
FEW = ("--sizes", "rows=18", "--sizes", "n=40", "--dtype", "fp32")


def check(name, like, *words, capsys):
    """Return the exit code, the verdicts by claim, and the record."""
    code = main.main(["check", f"{FILE}:{name}", "--like", like, "--json", "-q", *words])
    printed = capsys.readouterr()
    record = json.loads(printed.out) if printed.out else printed.err
    claims = record["contract"]["claims"] if printed.out else []
    return code, {c["claim"]: (c["verdict"], c["detail"]) for c in claims}, record


def test_a_right_kernel_is_kept(capsys):
    words = ("--forward-only", "--dtype", "bf16", "--quick", "--claims", "rows,accuracy")
    code, found, record = check("rms_norm", "rms_norm", *words, capsys=capsys)
    assert {claim: verdict for claim, (verdict, _) in found.items()} == dict.fromkeys(
        ("call", "rows", "accuracy"), "kept"
    )
    assert code == 0
    assert "compiled for sm_90, in the PTX machine, without a GPU" in record["run"][0]
    assert re.search(r"rms_norm_kernel \(\d+ launches\)", record["run"][0])
    assert record["sizes"] == ["x [rows, n], weight [n]: rows 3, 18; n 40; bfloat16 (all claims)"]


def test_a_backward_of_kernels_is_judged(capsys):
    words = (*FEW, "--claims", "rows-of-the-gradient,gradients")
    code, found, record = check("Silu", "silu", *words, capsys=capsys)
    assert [verdict for verdict, _ in found.values()] == ["kept"] * 3
    assert code == 0
    assert "slope_kernel" in record["run"][0]


def test_an_autotuned_kernel_is_judged_in_each_configuration(capsys):
    words = (*FEW, "--forward-only", "--claims", "accuracy")
    code, found, record = check("linear", "linear", *words, capsys=capsys)
    assert found["configurations"][0] == "kept"
    assert code == 0
    assert "2 of 2 configurations compared" in record["run"]
    words = ("--sizes", "rows=18", "--sizes", "n=300", "--dtype", "fp32", *words[-3:])
    code, found, _ = check("rms_norm_varied", "rms_norm", *words, capsys=capsys)
    assert code == 1
    assert found["configurations"][0] == "broken"
    assert "num_warps=1" in found["configurations"][1]
    limit = ("--configurations", "1")
    _, found, record = check("rms_norm_varied", "rms_norm", *words, *limit, capsys=capsys)
    assert found["configurations"][0] == "kept"
    assert any("1 of 2 configurations compared; for all: " in line for line in record["run"])


@pytest.mark.parametrize(
    ("name", "like", "claim", "said"),
    [
        ("rms_norm_by_rows", "rms_norm", "rows", "rows "),
        ("rms_norm_of_strided", "rms_norm", "storage", "stored "),
        ("silu_outside", "silu", "call", "inside out .*a write of 4 bytes"),
    ],
)
def test_a_wrong_kernel_is_rejected(name, like, claim, said, capsys):
    words = (*FEW, "--forward-only", *(("--claims", claim) if claim != "call" else ()))
    code, found, record = check(name, like, *words, capsys=capsys)
    assert code == 1
    assert found[claim][0] == "broken"
    assert re.search(said, found[claim][1])
    if claim == "rows":
        replay = record["contract"]["claims"][-1]["replay"].partition("&& ")[2]
        words = re.findall(r"'[^']*'|\S+", replay)[1:]
        assert main.main([w.strip("'") for w in words]) == 1
        assert "differ" in capsys.readouterr().out


def test_the_interpreter_is_not_used_silently(tmp_path):
    words = ("check", f"{FILE}:rms_norm", "--like", "rms_norm", *FEW, "--forward-only")
    done = subprocess.run(
        [sys.executable, "-m", "isobit", *words, "--claims", "accuracy", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    assert "PTX machine" in run[0]
    assert "TRITON_INTERPRET is set and was not used" in run
    assert "accuracy" in done.stderr or "rows" in done.stderr or not done.stderr


def test_every_operator_has_few_sizes_and_large_ones():
    for like in LIKE:
        whole = chosen(like, None)
        few = with_few_sizes(whole, like, quick=False)
        assert set(few.inputs) == set(whole.inputs)
        assert {c.id for c in few.claims if "wide" in c.inputs} == {"accuracy"}
        quick = with_few_sizes(whole, like, quick=True)
        assert not {"wide", "many"} & set(quick.inputs)
        assert len(sizes_in_words(whole)) == len(whole.inputs)


def test_sizes_of_the_command_line_replace_the_listed_ones():
    found = with_given_sizes(chosen("softmax", None), [("n", (32768,)), ("rows", (2, 4))])
    assert list(found.inputs) == ["rows", "massive"]
    for drawn in found.inputs.values():
        assert dict(drawn.sizes) == {"rows": (2, 4), "n": (32768,)}
    with pytest.raises(ArgumentError, match="rows, n"):
        with_given_sizes(chosen("softmax", None), [("v", (3,))])
