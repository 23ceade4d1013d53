"""Theorem: `isobit check` passes kernels that are right, whosever they are, and rejects wrong ones.

1. Kernels of torch and transformers, row by row, keep every claim; so do isobit's, in tests/contracts/test_library.py.
2. Stock PyTorch breaks what it is known to break, and keeps what it is known to keep.
3. A kernel with one fault breaks the claim that is there for it.
"""

import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.judged_kernels import records_of
from isobit.cli import check as command
from isobit.cli import main
from isobit.contracts.judge.bound import bind, on_device
from isobit.contracts.judge.verify import try_one, verify_contract
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.library.any_kernel import wrong
from isobit.library.any_kernel.kernel_call import operator_of
from isobit.library.any_kernel.kernel_judging import chosen
from isobit.library.any_kernel.signatures import LIKE
from tests.sweeps import mostly_full

ROOT = Path(__file__).parents[2]
RIGHT = (
    "linear", "rms_norm", "layer_norm", "softmax", "softmax_in_fp64", "log_softmax", "log_softmax_by_parts", "silu",
    "silu_by_sigmoid", "gelu", "swiglu", "attention", "gqa", "rope", "rope_in_fp64", "embedding", "cross_entropy",
    "cross_entropy_in_fp32", "logprob",
)  # fmt: skip
QUICK = ("softmax_in_fp64", "rope_in_fp64", "embedding")
STOCK = {
    "linear": {"rows", "storage"},
    "rms_norm": {"storage"},
    "layer_norm": set(),
    "softmax": set(),
    "log_softmax": set(),
    "silu": {"rows", "rows-of-the-gradient", "storage"},
    "attention": {"storage", "decode-is-prefill"},
    "embedding": {"gradients"},  # torch adds the table's gradient in 16 bits
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    yield
    sys.modules.pop("right_kernels", None)


def judge(code, like, dtypes=None):
    options = Options(trusted=("right_kernels", "torch", "test_any_kernel"), subject=code, level=2)
    return {r.claim: r for r in verify_contract(chosen(like, dtypes), options)}


def like_of(name):
    return max((like for like in LIKE if name.startswith(like)), key=len)


def test_every_operator_has_a_contract():
    files = sorted(p.name.partition(".")[0] for p in (library() / "any_kernel").glob("*.yaml"))
    assert files == sorted(LIKE)
    assert {like_of(name) for name in RIGHT} == set(LIKE)


def test_the_page_has_every_call_and_tolerance():
    page = (ROOT / "docs/how-to/check-a-kernel.md").read_text()
    for like, call in LIKE.items():
        kind = operator_of(chosen(like, None), Options())
        assert f"| {like} | {kind.FORWARD} | {kind.BACKWARD} | " in page
        assert f"| {like} | `{call.partition(')')[0]})`{call.partition(')')[2]} |" in page


@pytest.mark.parametrize("name", mostly_full(RIGHT, QUICK))
def test_a_right_kernel_keeps_every_claim(name):
    found = judge(f"right_kernels:{name}", like_of(name))
    assert {claim: (r.verdict, r.detail) for claim, r in found.items()} == dict.fromkeys(
        found, ("kept", "")
    )
    counts = {claim: (r.compared, len(r.planted)) for claim, r in found.items()}
    assert all(compared > 500 and planted for compared, planted in counts.values()), counts


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.sweep(3)
def test_stock_keeps_and_breaks_what_it_is_known_to(name):
    found = judge("stock", name)
    broken = {id for id, r in found.items() if r.verdict == "broken"}
    # What its backward does on several threads is not ours to promise.
    assert STOCK[name] <= broken <= STOCK[name] | {"rows-of-the-gradient", "storage"}
    assert {id for id, r in found.items() if r.verdict == "kept"} == set(found) - broken
    assert found["accuracy"].verdict == "kept"


def wrong_kernels():
    """Every kernel of isobit.library.any_kernel.wrong, with the claim that names it."""
    for like in LIKE:
        contract = chosen(like, None)
        for claim in contract.claims:
            for name in claim.sabotage:
                if ".any_kernel.wrong:" in name:
                    yield contract, claim, name


def test_every_wrong_kernel_is_rejected():
    options, found = Options(level=2), {}
    for contract, claim, name in wrong_kernels():
        planted = bind(contract, claim, options).plant(name)
        found[claim.id, name] = try_one(planted, name)
    print(f"{sum(p.caught for p in found.values())} of {len(found)} wrong kernels rejected")
    assert len(found) >= 60
    assert {key: p.detail for key, p in found.items() if not p.caught} == {}


def test_no_wrong_kernel_is_left_out_of_the_contracts():
    written = {
        name
        for name, one in vars(wrong).items()
        if inspect.isfunction(one) and one.__module__ == wrong.__name__
    }
    named = {name.partition(":")[2] for _, _, name in wrong_kernels()}
    assert written - named == {"narrowed", "weighted"}  # parts of the others


def by_batch(x, weight):
    """RMS norm with another order of addition in large batches."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    z = F.rms_norm(x.flip(-1), x.shape[-1:], weight.flip(-1), 1e-6).flip(-1)
    return z if len(x) > 20 else y


def test_a_wrong_kernel_breaks_its_claim():
    found = judge("test_any_kernel:by_batch", "rms_norm", ["float32"])
    assert found["rows"].verdict == "broken"
    assert found["rows"].replay


def test_every_planted_fault_is_caught_on_any_right_subject():
    found = [r for name in ("softmax", "layer_norm") for r in judge("", name).values()]
    assert sum(len(r.planted) for r in found) > 50
    assert all(p.caught for r in found for p in r.planted)


def check(*words, capsys):
    code = main.main(["check", *words, "-q"])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ("torch.nn.functional:silu", "--like", "silu", "--dtype", "fp32", "--html", str(page))
    code, out, _ = check(*words, capsys=capsys)
    assert code == 1
    assert "torch.nn.functional:silu as silu: 4 of 7 claims kept; sabotage caught 15 of 15" in out
    assert "BROKEN rows: rows " in out
    assert "any-silu-v1" in page.read_text()
    code, out, _ = check("isobit:silu", "--like", "silu", "--json", capsys=capsys)
    assert code == 0
    assert '"kernel": "isobit:silu"' in out


KERNELS = {
    "right_silu": "import isobit\ndef silu(x): return isobit.silu(x)",
    "stock_silu": "import torch\ndef silu(x): return torch.nn.functional.silu(x)",
    "no_silu": "import no_such_package",
    "other": "def gelu(x): return x",
}
SILU = ("--like", "silu", "--dtype", "fp32", "--quick")


def write_kernels(folder, **more):
    for name, text in {**KERNELS, **more}.items():
        (folder / f"{name}.py").write_text(text)


def test_a_folder_of_kernels(tmp_path, monkeypatch, capsys):
    """Each kernel has the verdict that it has by itself; what cannot be called is counted, not left out."""
    write_kernels(tmp_path)
    monkeypatch.setattr(command, "open_engine", lambda *_: ThreadPoolExecutor(1))
    code, out, _ = check(f"{tmp_path}:silu", *SILU, "--json", capsys=capsys)
    found = {Path(one["kernel"]).name: one for one in json.loads(out)["kernels"]}
    codes = {name: one["exit_code"] for name, one in found.items()}
    wanted = {"no_silu": 2, "other": 2, "right_silu": 0, "stock_silu": 1}
    assert (code, codes) == (1, {f"{name}.py:silu": exit for name, exit in wanted.items()})
    alone = check(f"{tmp_path / 'stock_silu.py'}:silu", *SILU, "--json", capsys=capsys)
    claims = [[c["verdict"] for c in one["contract"]["claims"]]
              for one in (json.loads(alone[1]), found["stock_silu.py:silu"])]  # fmt: skip
    assert claims[0] == claims[1]
    (tmp_path / "stock_silu.py").unlink()
    code, out, _ = check(f"{tmp_path}:silu", *SILU, capsys=capsys)
    assert code == 2
    assert "of 3 kernels 1 kept, 0 broken, 2 could not be judged" in " ".join(out.split())
    (tmp_path / "empty").mkdir()
    for words in ((f"{tmp_path / 'empty'}:silu", *SILU), ("isobit:silu", *SILU, "--jobs", "2")):
        code, _, err = check(*words, capsys=capsys)
        assert code == 2
        assert "remedy: " in err


@pytest.mark.full
def test_a_kernel_that_ends_its_process_costs_no_other_its_verdict(tmp_path, capsys):
    write_kernels(tmp_path, dies="import os\ndef silu(x): os._exit(3)")
    code, out, _ = check(f"{tmp_path}:silu", *SILU, "--jobs", "2", capsys=capsys)
    assert code == 1
    assert "dies.py:silu: could not be judged: its process died" in out
    assert "of 5 kernels 1 kept, 1 broken, 3 could not be judged" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("torch:chunk", "--like", "silu"), "to be called as silu(x)"),
        (("torch:split", "--like", "silu", "--dtype", "bf16"), "in bfloat16"),
        (("no_such_package:f", "--like", "silu"), "an existing object"),
        (("torch.nn.functional:silu", "--like", "silu", "--device", "fpga9"), "a device of torch"),
    ],
)
def test_what_cannot_run_is_refused(words, told, capsys):
    code, _, err = check(*words, capsys=capsys)
    assert code == 2
    assert told in err
    assert "remedy: " in err


def test_a_candidate_that_cannot_be_called_is_a_row_of_its_own():
    options = Options(trusted=("torch",), subject="torch:chunk", level=2)
    (row,) = records_of(chosen("silu", None), options, "silu")
    assert row.verdict == "could-not-run"
    assert "to be called as silu(x)" in row.detail


@pytest.mark.full
def test_kernels_of_liger_run_in_the_interpreter():
    """Its norm writes to the gradient that it is given, and that is what its row says."""
    pytest.importorskip("liger_kernel", reason="pip install -c constraints.txt liger-kernel")
    words = [sys.executable, "-m", "benchmarks.liger_kernels", "rms_norm"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    ((name, _, (row,)),) = json.loads(done.stdout)
    assert (name, row["claim"], row["verdict"]) == ("rms_norm", "call", "broken")
    assert "its backward writes to the gradient that it is given" in row["detail"]


def test_tensors_are_on_the_device_when_the_kernel_is_called():
    seen = []

    def kernel(x, scale):
        seen.append((x.device.type, scale))
        return torch.ones(3)

    assert on_device(kernel, "meta")(torch.zeros(3), 2.0).device.type == "cpu"
    assert seen == [("meta", 2.0)]
