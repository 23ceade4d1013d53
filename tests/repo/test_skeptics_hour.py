"""The script for skeptics finds the claims as they are, and says where a claim or its control comes out otherwise."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import isobit

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "skeptics_hour.py"


@pytest.mark.parametrize(
    "part",
    [
        "same_row",
        "own_sabotage",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                *("doctor", "model", "training", "processes", "sabotage"),
                *("rollout", "certificate", "deadlock"),
            )
        ),
    ],
)
def test_a_part_is_as_claimed(part):
    words = [sys.executable, SCRIPT, "--only", part]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 of 1 parts as claimed" in done.stdout
    assert done.stdout.startswith(f"isobit {isobit.__version__}, torch ")


def test_the_page_lists_every_part():
    page = (ROOT / "docs/how-to/check-our-claims.md").read_text()
    parts = runpy.run_path(str(SCRIPT))["PARTS"]
    assert len(parts) == 10
    assert [part.__name__ for part in parts if f"| `{part.__name__}` |" not in page] == []


def broken(part, printed):
    """Return what a part says if its command prints this."""
    names = runpy.run_path(str(SCRIPT))
    function = names[part]
    function.__globals__["run"] = lambda *words, **options: printed
    with pytest.raises(names["Failed"]) as raised:
        function(None, Path())
    return str(raised.value)


def rows_of(differ):
    return {"rows": [{"differ": differ, "numbers": 9}]}


@pytest.mark.parametrize(
    ("part", "printed", "why"),
    [
        ("same_row", "F.linear 0 of 1024 differ\nisobit.linear 0 of 1024 elements differ", "control"),
        ("same_row", "F.linear 9 elements differ, first\nisobit.linear 1 elements differ, first", "1 el"),
        ("model", json.dumps({"isobit": rows_of(0), "stock": rows_of(0)}), "control"),
        ("model", json.dumps({"isobit": {"rows": []}, "stock": rows_of(1)}), "isobit: [0, 0]"),
        ("training", '{"verdicts": [{"side": "isobit", "weights": 1}, {"side": "stock", "weights": 1}]}', "control"),
        ("training", '{"verdicts": [{"side": "isobit", "weights": 2}, {"side": "stock", "weights": 2}]}', "weights"),
        ("sabotage", '{"contracts": [{"claims": [{"planted": [{"caught": true}, {"caught": false}]}]}]}', "1 of 2"),
        ("sabotage", '{"contracts": []}', "0 of 0"),
        ("rollout", "stock   KL exactly 0 at 8 of 8 steps\nisobit  KL exactly 0 at 8 of 8 steps", "control"),
        ("rollout", "stock   KL exactly 0 at 0 of 8 steps\nisobit  KL exactly 0 at 7 of 8 steps", "7 of 8"),
    ],
)  # fmt: skip
def test_what_comes_out_otherwise_is_said(part, printed, why):
    assert why in broken(part, printed)
