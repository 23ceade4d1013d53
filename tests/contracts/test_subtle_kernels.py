"""Theorem: kernels that are wrong in one rare way are rejected by `isobit check`; odd ones that are right are kept."""

import json
import sys
from pathlib import Path

import pytest

from isobit.cli import main
from tests.sweeps import mostly_full

FILE = str(Path(__file__).with_name("subtle_kernels.py"))
# A kernel, and one of the claims that it breaks; nothing for right ones.
KERNELS = {
    "in_fp64": "",
    "without_negative_zeros": "",
    "wide_rows": "accuracy",
    "many_rows": "accuracy",
    "once_in_fifty": "rows",
    "kept_by_address": "rows",
    "split_by_rows": "rows",
    "split_by_threads": "storage",
    "pairs_of_rows": "rows",
    "without_the_tail": "call",
    "of_contiguous_memory": "storage",
    "in_training": "gradients",
    "hides_nan": "call",
    "leaks_nan": "call",
    "gradient_by_batch": "rows-of-the-gradient",
}
QUICK = ("in_fp64", "wide_rows", "many_rows", "split_by_rows", "hides_nan", "leaks_nan")


def broken_claims(name, like, dtype, capsys, *words):
    sys.modules.pop("subtle_kernels", None)
    code = main.main(
        ["check", f"{FILE}:{name}", "--like", like, "--dtype", dtype, "--json", "-q", *words]
    )
    claims = json.loads(capsys.readouterr().out)["contract"]["claims"]
    broken = {claim["claim"] for claim in claims if claim["verdict"] == "broken"}
    assert {c["verdict"] for c in claims} <= {"kept", "broken"}
    assert code == bool(broken)
    return broken


@pytest.mark.parametrize("name", mostly_full(KERNELS, QUICK))
def test_a_subtle_fault_is_found(name, capsys):
    broken = broken_claims(name, "rms_norm", "fp32", capsys)
    assert KERNELS[name] in broken if KERNELS[name] else not broken


def test_a_sum_in_bf16_is_rejected_at_a_vocabulary(capsys):
    """It keeps every bound up to 300 columns, and its rows sum to 0.9 at 32,768."""
    words = ("--claims", "accuracy", "--forward-only")
    assert broken_claims("softmax_of_chunks", "softmax", "bf16", capsys, *words) == {"accuracy"}
    few = (*words, "--sizes", "n=7,64,300")
    assert not broken_claims("softmax_of_chunks", "softmax", "bf16", capsys, *few)
    asked = (*words, "--sizes", "n=32768", "--sizes", "rows=4")
    assert broken_claims("softmax_of_chunks", "softmax", "bf16", capsys, *asked) == {"accuracy"}
    for dtype in ("bf16", "fp16", "fp32"):
        assert not broken_claims("softmax_of_chunks_in_fp32", "softmax", dtype, capsys, *words)


@pytest.mark.parametrize(
    ("name", "like", "dtype"),
    [
        ("softmax_without_maximum", "softmax", "fp32"),
        ("silu_by_powers", "silu", "bf16"),
        ("mean_in_fp16", "rms_norm", "fp16"),
    ],
)
def test_what_overflows_at_large_values_is_rejected(name, like, dtype, capsys):
    """They are within every bound for values of about 1, and NaN or zero at 512."""
    words = ("--claims", "accuracy,overflow", "--forward-only")
    assert broken_claims(name, like, dtype, capsys, *words) == {"overflow"}
    assert broken_claims(name, like, dtype, capsys, *words, "--quick") == {"overflow"}
