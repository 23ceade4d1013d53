"""`isobit certify`: exit codes, records, files, and errors with a remedy; the engine is replaced by records."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from isobit.cli import certify as command
from isobit.cli.main import main, parse
from isobit.errors import UnsupportedError
from isobit.foundation import files
from tests.report import fake_certificates as fakes

KERNELS = """
import torch, triton, triton.language as tl

@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def doubled(rows, BLOCK=64, num_warps=4):
    print("hello")
    x = torch.randn(rows, 32)
    out = torch.empty_like(x)
    double[(triton.cdiv(rows * 32, BLOCK),)](x, out, rows * 32, BLOCK, num_warps=num_warps)
    return out

number = 5

@triton.jit
def four_times_too_far(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + 4 * at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def one_too_far(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + 1))

def launch(kernel, rows):
    x = torch.randn(rows, 32)
    out = torch.empty_like(x)
    kernel[(rows,)](x, out, rows * 32, 32)
    return out

def writes_outside(rows):
    return launch(four_times_too_far, rows)

def reads_outside(rows):
    return launch(one_too_far, rows)

@triton.jit
def root(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.exp(tl.load(x + at)))

def exponentials(rows):
    x = torch.randn(rows, 32)
    out = torch.empty_like(x)
    root[(rows,)](x, out, 32)
    return out
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "certified_kernels.py").write_text(KERNELS)
    (tmp_path / "broken.py").write_text("import surely_not_installed\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "sibling.py").write_text("import beside\ndef f(rows): pass\n")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def engine(monkeypatch):
    """Replace the engine: what it is asked for, and what it answers."""
    asked = {}

    def install(found):
        def certify(function, **options):
            asked.update(options, function=function)
            options["progress"]("compiling", 1, 2)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr("isobit.certifying.api.certify", certify)
        return asked

    return install


@pytest.mark.parametrize(
    ("name", "code"),
    [("kept", 0), ("split by rows", 1), ("atomics", 1), ("refused", 2), ("rows differ", 1)],
)
def test_exit_codes(name, code, folder, engine, capsys):
    engine(fakes.CASES[name]())
    assert main(["certify", "certified_kernels.py:doubled"]) == code
    assert "Certificate of certified_kernels.py:doubled" in capsys.readouterr().out


def test_options_reach_the_engine(folder, engine):
    asked = engine(fakes.kept())
    words = ["--rows", "1,17", "--vary", "BLOCK=16,64", "--vary", "num_warps=2,4"]
    assert main(["certify", "certified_kernels.py:doubled", *words, "--target", "sm_80,sm_90"]) == 0
    assert asked["function"].__name__ == "doubled"
    assert asked["rows"] == [1, 17]
    assert asked["vary"] == {"BLOCK": [16, 64], "num_warps": [2, 4]}
    assert asked["targets"] == ["sm_80", "sm_90"]
    assert main(["certify", "certified_kernels:doubled"]) == 0
    assert asked["rows"] is None
    assert asked["vary"] == {}


def test_values_of_a_setting():
    found = parse(["certify", "f", "--vary", "x=1,-2,0.5,true,None,ieee"]).vary
    assert found == [("x", [1, -2, 0.5, True, None, "ieee"])]


@pytest.mark.parametrize(
    "words",
    [
        ["--vary", "BLOCK"],
        ["--vary", "BLOCK="],
        ["--vary", "rows=1,2"],
        ["--vary", "B=1,1"],
        ["--vary", "a b=1"],
        ["--rows", "0"],
        ["--rows", "x"],
        ["--target", ""],
        ["--target", "sm_80,sm_80"],
    ],
)
def test_options_that_cannot_be(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["certify", "certified_kernels.py:doubled", *words])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("function", "words", "says"),
    [
        ("certified_kernels.py", [], "FILE.py:function"),
        (":doubled", [], "FILE.py:function"),
        ("nowhere.py:doubled", [], "no such file"),
        ("certified_kernels.py:trippled", [], "doubled"),
        ("certified_kernels.py:double", [], "the kernel double itself"),
        ("certified_kernels.py:number", [], "a int"),
        ("broken.py:f", [], "pip install surely_not_installed"),
        ("leaves.py:f", [], "SystemExit"),
        ("no_such_module:f", [], "no_such_module"),
        ("sibling.py:f", [], "--trust beside"),
        ("certified_kernels.py:doubled", ["--html", "nowhere/x.html"], "--html"),
        ("certified_kernels.py:doubled", ["--html", "."], "--html"),
        ("certified_kernels.py:doubled", ["--ptx", "certified_kernels.py"], "--ptx"),
        ("certified_kernels.py:doubled", ["--vary", "B=1", "--vary", "B=2"], "--vary B twice"),
    ],
)
def test_refusals_have_a_remedy(function, words, says, folder, engine, capsys):
    engine(fakes.kept())
    assert main(["certify", function, *words]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert "remedy:" in shown


def test_a_trusted_sibling_is_found(folder, engine):
    engine(fakes.kept())
    assert main(["certify", "sibling.py:f", "--trust", "beside"]) == 0
    assert "sibling" not in sys.modules


def test_an_error_of_the_engine_is_one_of_the_command(folder, engine, capsys):
    error = UnsupportedError(expected="an instruction", received="lop3", remedy="report it")
    engine(error)
    assert main(["certify", "certified_kernels.py:doubled"]) == 2
    assert "remedy: report it" in capsys.readouterr().err


def test_json_has_provenance_and_is_all_of_the_output(folder, engine, capsys):
    engine(replace(fakes.split_by_rows(), provenance=None))
    assert main(["certify", "certified_kernels.py:doubled", "--json", "-q"]) == 1
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record["format"] == "isobit certificate 1"
    assert record["function"] == "certified_kernels.py:doubled"
    assert (
        record["provenance"]["command"] == "isobit certify certified_kernels.py:doubled --json -q"
    )
    assert shown.err == ""


def test_the_page_is_written_whole_or_not_at_all(folder, engine, monkeypatch):
    engine(fakes.split_by_rows())
    assert main(["certify", "certified_kernels.py:doubled", "--html", "page.html", "-q"]) == 1
    page = (folder / "page.html").read_text()
    assert "Certificate of certified_kernels.py:doubled" in page

    def fails(found):
        raise OSError("no space")

    monkeypatch.setattr(command, "write_certificate_page", fails)
    assert main(["certify", "certified_kernels.py:doubled", "--html", "page.html", "-q"]) == 2
    assert (folder / "page.html").read_text() == page
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_real_kernel_from_the_command_line(folder, capsys):
    words = ["certify", "certified_kernels.py:doubled", "--rows", "1,3", "--target", "sm_80", "-q"]
    assert main([*words, "--vary", "BLOCK=32,64", "--ptx", "compiled", "--json"]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert "hello" in shown.err  # what the wrapper prints is not in the record
    assert record["conclusion"].startswith("One expression in all 4 configurations on sm_80")
    assert record["names"] == 2 * (1 + 3) * 32
    (target,) = record["targets"]
    written = sorted(path.name for path in (folder / "compiled").iterdir())
    digests = sorted({kernel["digest"][:12] for kernel in target["kernels"]})
    assert written == [f"double-sm_80-{digest}.ptx" for digest in digests]
    assert ".target sm_80" in (folder / "compiled" / written[0]).read_text()


def test_options_state_the_defaults_of_the_engine():
    from isobit.certifying.api import TARGETS
    from isobit.certifying.judging.configurations import ROWS

    assert command.ROWS == ROWS
    assert command.TARGETS == TARGETS


def test_a_certificate_is_printed_though_its_page_cannot_be_written(
    folder, engine, monkeypatch, capsys
):
    engine(fakes.kept())

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.files, "write_text", full)
    code = main(["certify", "certified_kernels.py:doubled", "--html", "page.html", "-q"])
    printed = capsys.readouterr()
    assert code == 2  # nobody may take the missing page for one that was written
    assert "One expression" in printed.out
    assert "No space left" in printed.err
    assert "remedy: give --html another path" in printed.err


@pytest.mark.parametrize("option", ["--html", "--ptx"])
def test_devices_are_not_replaced(option, folder, engine, capsys):
    asked = engine(fakes.kept())
    os.mkfifo(folder / "pipe")
    assert main(["certify", "certified_kernels.py:doubled", option, "pipe", "-q"]) == 2
    assert f"{option} pipe" in capsys.readouterr().err
    assert not asked  # before anything is compiled
    with pytest.raises(OSError, match="not a regular file"):
        files.write_text(folder / "pipe", "text")
    assert (folder / "pipe").is_fifo()
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".pipe")) == []


def test_a_function_that_exits_has_no_verdict(folder, capsys):
    (folder / "exits.py").write_text(KERNELS + "\ndef leaves(rows):\n    raise SystemExit(0)\n")
    assert main(["certify", "exits.py:leaves", "--rows", "1", "--target", "sm_80", "-q"]) == 2
    assert "SystemExit at exits.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("writes_outside", "a write of 4 bytes at byte 496, .*inside out \\(128 bytes\\)"),
        ("reads_outside", "a read of 4 bytes at byte 128, .*inside x \\(128 bytes\\)"),
    ],
)
def test_an_access_outside_a_buffer_is_broken_and_named(folder, capsys, function, what):
    """ALB-043: an output that is written at four times its size."""
    words = ["--rows", "1", "--target", "sm_90", "-q"]
    assert main(["certify", f"certified_kernels.py:{function}", *words]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "a kernel leaves its buffers" in said
    assert re.search(what, said)
    assert re.search(r"broken: sm_90 .* at certified_kernels.py:\d+, PTX line \d+", said)


def test_approximations_are_not_called_equal_across_targets(folder, capsys):
    words = ["--rows", "1,2", "--target", "sm_80,sm_90", "-q"]
    assert main(["certify", "certified_kernels.py:exponentials", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The same expression in all 4 configurations" in said
    assert "the same bits on each target" in said
    assert "each GPU has its own approximation of ex2.approx" in said
    assert main(["certify", "certified_kernels.py:doubled", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "One expression in all 4 configurations" in said
    assert "a row has the same bits in each" in said
