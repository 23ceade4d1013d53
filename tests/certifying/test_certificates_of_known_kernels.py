"""The benchmark of certificates fails if a wrong kernel has one, or a threshold in a kernel is not named."""

import io

import pytest

pytest.importorskip("triton")

from rich.console import Console

from benchmarks import certificates

NAMED = {"raised": False, "kept": True, "code": 0, "seconds": 1.0, "why": "", "most": None}


@pytest.fixture
def printed(monkeypatch):
    """Replace all verdicts by one; return a function that gives what a table prints, and its result."""

    def show(table, verdict):
        monkeypatch.setattr(certificates, "kept_verdict", lambda *given: verdict)
        console = Console(file=io.StringIO(), width=200)
        found = table(console, quick=False)
        return found, console.file.getvalue()

    return show


def test_a_certificate_that_names_no_threshold_is_silent(printed):
    silent, shown = printed(certificates.show_thresholds, NAMED | {"left": []})
    assert silent == len(certificates.THRESHOLDS) == 10
    assert "0 of 10 planted thresholds" in shown
    said = [f"a number of the launch passes {rows:,} rows" for rows in certificates.THRESHOLDS]
    silent, shown = printed(certificates.show_thresholds, NAMED | {"left": said})
    assert silent == 0
    assert "10 of 10 planted thresholds" in shown


def test_a_wrong_kernel_with_a_certificate_is_counted(printed):
    (false, judged), shown = printed(certificates.show_wrong, NAMED)
    assert false == judged > 100
    assert shown.count("false certificate: ") == false
    (false, judged), _ = printed(certificates.show_wrong, NAMED | {"kept": False, "code": 1})
    assert false == 0
    assert judged > 100


def test_a_right_kernel_that_took_too_long_is_not_called_broken(printed, monkeypatch):
    monkeypatch.setattr(certificates, "right_kernels", lambda: [("slow", None)])
    late = NAMED | {"kept": False, "code": None, "why": "not judged in 120 s"}
    kept, shown = printed(certificates.show_right, late)
    assert kept == 0
    assert "broken" not in shown
    assert "1 were not judged" in shown
