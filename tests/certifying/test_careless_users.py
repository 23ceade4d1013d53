"""What careless and hostile users do: each gets a certificate that is true, or an error with a remedy that works."""

import os
import threading

import pytest

import isobit
from isobit.certifying.records import BROKEN, EXECUTED, REFUSED
from isobit.errors import ArgumentError
from tests.certifying import careless_subjects as careless
from tests.certifying import certify_subjects as subjects


def certify(function, rows=(1, 3), **given):
    return isobit.certify(function, rows=rows, targets=("sm_80",), **given)


def outcomes_of(found):
    return found.targets[0].outcomes


@pytest.mark.parametrize(
    "function",
    [
        careless.in_place,
        careless.in_place_twice,
        careless.strided,
        careless.reversed_view,
        careless.heuristic,
        careless.lambda_grid,
        careless.returns_tuple,
        careless.two_views,
        careless.launches_in_thread,
        careless.exponential,
        careless.calls_cuda,
        careless.asks_the_card,
    ],
)
@pytest.mark.sweep(5)
def test_unusual_but_right_functions_are_kept(function):
    found = certify(function)
    assert found.kept, str(found)
    assert found.names > 0


def test_a_wrapper_that_takes_tensors_is_shown_the_function_to_write():
    def my_norm(x, weight):
        return x * weight

    with pytest.raises(
        ArgumentError, match=r"def certified\(rows\): return my_norm\(x=…, weight=…\)"
    ):
        certify(my_norm, rows=None)


def test_all_configurations_of_an_autotuner_are_judged():
    found = certify(careless.many)
    assert found.kept
    assert len(outcomes_of(found)) == 2 * 18


def test_views_that_overlap_are_one_buffer():
    """Reading x[:-1] and writing x[1:] is a race between threads: with two buffers it would not be seen."""
    found = certify(careless.overlapping)
    assert {one.verdict for one in outcomes_of(found)} == {BROKEN}
    assert found.exit_code == 1
    assert "another tensor" in outcomes_of(found)[0].remedy


def test_threads_that_load_one_element_in_place_are_no_race_if_one_stores():
    """With 4 warps two threads load an element and one stores it: what the other reads too late is never used."""
    found = certify(careless.in_place, vary={"num_warps": (2, 4)})
    assert found.kept, str(found)
    assert {one.verdict for one in outcomes_of(found)} == {EXECUTED}


@pytest.mark.parametrize(
    ("function", "reason", "remedy"),
    [
        (careless.prints, "tl.device_print", "remove it"),
        (careless.asserts, "tl.device_assert", "debug"),
        (careless.loops_on_data, "computed from float data", "tl.where"),
        (careless.zero_columns, "[1, 0]", "not zero"),
        (careless.zero_programs, "no kernel wrote it", "at least one launch"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(function, reason, remedy):
    found = certify(function)
    assert found.exit_code == 2
    assert {one.verdict for one in outcomes_of(found)} == {REFUSED}
    assert reason in outcomes_of(found)[0].reason
    assert remedy in outcomes_of(found)[0].remedy


@pytest.mark.parametrize(
    ("function", "received"),
    [
        (careless.returns_dict, "dict"),
        (careless.returns_some, "a tuple of Tensor, NoneType"),
        (careless.returns_number, "float"),
        (careless.exits, "SystemExit"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(function, received):
    with pytest.raises(ArgumentError) as caught:
        certify(function)
    assert received in caught.value.received
    assert caught.value.remedy


def test_an_interrupt_leaves_nothing_behind():
    from triton.runtime import autotuner, jit
    from triton.runtime.driver import driver

    before = jit.JITFunction.run, autotuner.Autotuner.run, driver._active
    with pytest.raises(KeyboardInterrupt):
        certify(careless.interrupts)
    assert (jit.JITFunction.run, autotuner.Autotuner.run, driver._active) == before
    assert certify(subjects.sums).kept


def test_a_second_thread_is_refused_and_the_first_is_not_disturbed():
    inside, leave = threading.Event(), threading.Event()
    errors, here = [], os.getpid()

    def slow(rows):
        inside.set()
        # First calls are made in a copy of this process, which has no second thread to wait for.
        assert os.getpid() != here or leave.wait(60)
        return subjects.sums(rows)

    def second():
        inside.wait(60)
        try:
            certify(subjects.norm)
        except ArgumentError as error:
            errors.append(error)
        leave.set()

    thread = threading.Thread(target=second)
    thread.start()
    found = certify(slow)
    thread.join()
    assert found.kept
    assert [error.received for error in errors] == ["a second one in the same process"]


def test_kernels_that_broke_are_listed():
    found = certify(careless.overlapping)
    assert [one.kernel for one in found.targets[0].kernels] == ["shift_kernel"]


def test_names_of_kernels_and_settings_are_text_on_the_page(tmp_path):
    hostile = "<script>alert(1)</script>"

    def function(rows, KIND="plain"):
        return subjects.sums(rows)

    function.__name__ = function.__qualname__ = hostile
    found = certify(function, vary={"KIND": (hostile, "b")})
    found.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert found.kept
    assert hostile not in page
    assert page.count("<script") == 1
