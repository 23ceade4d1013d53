"""What a certificate says of places and operations: no absolute path, and functions by the names that people know."""

import json
import os

import isobit
from isobit.certifying.judging.paths import PACKAGE, short_path
from isobit.certifying.running.recorded_run import written
from tests.certifying import careless_subjects as careless
from tests.certifying import certify_subjects as subjects


def test_paths_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "a" / "b.py")) == "a/b.py"
    assert short_path(os.path.join(PACKAGE, "certifying", "api.py")) == "isobit/certifying/api.py"
    assert short_path("/env/lib/site-packages/triton/language/core.py") == "triton/language/core.py"
    assert short_path("/elsewhere/kernels.py") == "kernels.py"
    assert short_path("kernels.py") == "kernels.py"
    assert short_path(str(tmp_path) + "2/kernels.py") == "kernels.py"  # no folder by a prefix


def test_no_absolute_path_is_in_a_certificate(tmp_path, monkeypatch):
    for folder in (tmp_path, os.path.dirname(subjects.__file__)):
        monkeypatch.chdir(folder)
        for function in (subjects.norm, careless.exponential, subjects.atomic):
            found = isobit.certify(function, rows=(1, 3), targets=("sm_80",))
            data = found.to_dict()
            data.pop("provenance")
            text = json.dumps(data)
            assert os.path.dirname(subjects.__file__) not in text
            assert PACKAGE not in text
            assert "site-packages/" not in text


def test_functions_are_written_as_triton_writes_them():
    assert written("ex2.approx.ftz.f32", ["x[0]"]) == "exp2(x[0])"
    assert written("lg2.approx.f32", ["x[0]"]) == "log2(x[0])"
    assert written("add.f32", ["a", "b"]) == "(a + b)"
    assert written("max.f32", ["a", "b"]) == "max.f32(a, b)"


def test_an_exponential_keeps_its_name_in_an_expression():
    found = isobit.certify(careless.exponential, rows=(1, 3), targets=("sm_80",))
    assert found.kept
    words = json.dumps(found.to_dict(), ensure_ascii=False)
    assert "ex2.approx" in words
    assert "(e.approx" not in words
    assert " e.approx" not in words
