"""Theorem: no kernel whose rows depend on the batch gets a certificate, and right kernels still do.

Every wrong kernel once had, or might have, exit code 0. One of each cause runs here, all of them in full.
"""

import inspect
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

import isobit
from isobit.certifying.judging.configurations import Surveyed, plan
from isobit.certifying.judging.scan import scan_rows
from tests.certifying import (
    more_wrong_kernels,
    right_kernels,
    wrong_calls,
    wrong_inputs,
    wrong_launches,
    wrong_rows,
    wrong_values,
)

NOT_WRONG = {
    *("mats", "make", "kernel_factory", "blocks", "warps_above", "branch_above"),  # parts of others
    *("folded", "of_tiles", "finished", "sums_by", "tuned_add"),
    *(
        "loop_on_data",
        "heads_before_rows",
    ),  # invariant; the first is refused, its branch depends on data
    "atomics_in_backward",  # its forward is right: the note about the backward pass has a test of its own
    "alignment",  # two settings, see below
    "splits_of_a_setting",
    *("scaled_by", "scaled_with", "shares_of", "times_function", "times_kernel"),
    *("weight_by_exponentials", "views_of_one_weight", "numbers_of_all_kinds"),  # right
    *("weight_read_by_python", "weight_after_draws_of_rows"),
}
# The row counts of these are nobody's choice: what they do at others is what is wrong.
BY_DEFAULT = {
    *("split_k_above_256", "split_k_at_200", "split_k_for_16_to_64"),
    *("split_k_when_tiles_are_full", "channels_first_4", "persistent_carries_over", "env_choice"),
    *("splits_as_a_number", "epsilon_of_large_batches", "block_by_parity", "block_by_remainder"),
    *("flag_of_large_batches", "as_many_tiles", "other_weight_of_large_batches"),
    *("kernel_of_a_factory", "another_weight_of_large_batches"),
    *("rounded_in_large_batches", "other_output_of_large_batches", "second_axis_of_large_batches"),
}
ABOVE_64 = (
    *("tf32_or_ieee", "tf32_or_tf32x3", "heuristics_on_m", "alignment_by_rows", "split_k_by_rows"),
    *("asm_rounding_by_m", "exp_by_m", "div_by_m", "relu_nan_by_m", "runtime_branch_on_m"),
    "stray_row_64",
)
ROWS = {
    **dict.fromkeys(ABOVE_64, (1, 66)),
    "float_atomics_large_batches_only": (1, 130),
    "channels_first": (1, 32),
    "statistics_of_the_batch": (3, 17),
    "spin_lock": (1, 3),
    "num_programs_start": (1, 3),
}
# One of each cause: (function, row counts, exit code, what the reason names)
QUICK = (
    (wrong_rows.int_splits_by_batch, (1, 17), 2, "splits of sum_in_splits"),
    (wrong_rows.int_positions_hide_parity, (1, 3), 1, "at another position"),
    (wrong_launches.int_of_other_row, (1, 3), 1, "the integers of other rows"),
    (wrong_inputs.other_weights_by_rows, (1, 17), 2, "w of scaled_rows"),
    (wrong_inputs.swapped_halves_by_rows, (1, 17), 1, "the number of rows"),
    (wrong_rows.torch_prescale_by_rows, (1, 17), 2, "aten::mul(other=2.0)"),
    (wrong_rows.fp32_as_int32, (1, 17), 1, "the number of rows"),
    (more_wrong_kernels.packed_weights, (1, 17), 1, "the number of rows"),
    (wrong_launches.two_kernels_of_one_name, (1, 3), 1, "kernel is tuned to"),
    (wrong_launches.pdl_without_wait, (1, 3), 1, "the launch before may still write it"),
    (wrong_launches.open_products_by_warps, (1, 17), 2, "ptxas may fuse"),
    (wrong_rows.stray_row_2, (1, 3), 1, "depend on another row"),
    (wrong_rows.torch_amax_scale, (1, 3), 2, "aten::amax"),
    (wrong_rows.spin_lock, (1,), 2, "nothing changes"),
    (wrong_launches.by_grad_mode, (1, 17), 2, "with gradients recorded"),
    (more_wrong_kernels.first_half_scaled, (1, 3), 2, "another part"),
    (more_wrong_kernels.transposed_weights, (1, 17), 2, "another part"),
    (wrong_calls.end_of_a_range, (1, 17), 2, "aten::linspace"),
    (wrong_calls.weight_below_rows, (1, 17), 2, "w of scaled_rows"),
    (wrong_calls.weight_of_integers, (1, 17), 2, "w of scaled_rows"),
    (wrong_calls.weight_at_an_index, (1, 17), 2, "w of scaled_rows"),
    (wrong_calls.weight_at_a_multiple_of_rows, (1, 17), 2, "one view of its storage"),
    (wrong_calls.weight_with_a_stride_of_rows, (1, 17), 2, "another part"),
    (wrong_calls.weight_by_seed, (1, 17), 2, "w of scaled_rows"),
    (wrong_calls.less_the_first_row, (1, 17), 2, "another part"),
    (wrong_calls.first_row_expanded, (1, 17), 2, "another part"),
    (wrong_calls.first_number_of_all, (1, 17), 2, "another part"),
    (wrong_calls.weight_by_the_seed_of_torch, (1, 17), 2, "x of scaled_rows"),
    (wrong_calls.copy_of_another_weight, (1, 17), 2, "w of scaled_rows"),
    (wrong_calls.copy_of_an_array, (1, 17), 2, "w of scaled_rows"),
    (wrong_calls.weight_that_numpy_knew_before, (1, 17), 2, "holds other values"),
    (wrong_calls.sums_of_calls_before, (1, 3), 2, "a second call has another result"),
    (wrong_values.largest_of_outside_rows, (1, 17), 2, "w of scaled_rows"),
    (wrong_values.warps_by_outside_rows, (1, 17), 2, "aten::_local_scalar_dense of a value"),
    (wrong_values.second_of_one_recipe, (1, 17), 2, "w of scaled_rows"),
    (wrong_values.copy_of_another_half, (1, 17), 2, "w of scaled_rows"),
    (wrong_values.channels_last_rows, (1, 17), 2, "x of shares"),
    (wrong_values.last_row_is_flagged, (3, 17), 2, "flags of by_flag"),
    (wrong_values.warps_by_the_number_of_some_value, (1, 17), 2, "aten::index of a value"),
    (wrong_values.changed_in_a_thread, (1, 17), 2, "w of scaled_rows"),
    (wrong_values.changed_in_a_thread_between_launches, (1, 17), 2, "changed after a launch"),
    (wrong_values.changed_by_a_hook, (1, 17), 2, "made by aten::mul_(other=3)"),
    (wrong_values.function_of_a_factory, (1, 17), 1, "the number of rows"),
    (wrong_values.warps_by_a_row_as_a_list, (1, 17), 2, "reads the same values"),
    (wrong_values.another_half_of_empty_memory, (1, 17), 2, "w of scaled_rows"),
    (wrong_values.precision_by_rows, (1, 17), 2, "aten::mm"),
    (wrong_values.another_weight_of_large_batches, None, 2, "w of scaled_rows holds other"),
    (wrong_inputs.numpy_changes_weight, (1, 17), 2, "w of scaled_rows"),
    (wrong_inputs.numpy_changes_outside_weight, (1, 17), 2, "w of scaled_rows"),
    (wrong_inputs.numpy_changes_what_is_copied, (1, 17), 2, "w of scaled_rows"),
    (wrong_inputs.numpy_changes_what_is_sorted, (1, 17), 2, "computed by torch (aten::sort)"),
    (wrong_inputs.numpy_changes_result, (1, 17), 2, "that a kernel wrote"),
    (wrong_inputs.numpy_keeps_result, (1, 17), 2, "out of scaled_rows was given to numpy"),
    (wrong_inputs.numpy_changes_between_launches, (1, 17), 2, "changed after a launch"),
    (wrong_inputs.byte_of_other_row, (1, 3), 1, "depend on another row"),
    (wrong_inputs.a_part_is_given, (1, 3), 2, "were given only a part of it"),
    (wrong_launches.warps_by_list_of_lengths, (1, 3), 2, "Tensor.tolist of a value"),
    (wrong_launches.warps_by_list, (1, 3), 2, "Tensor.tolist of a value"),
    (wrong_launches.warps_by_numpy, (1, 3), 2, "Tensor.numpy of a value"),
    (wrong_launches.warps_by_array, (1, 3), 2, "Tensor.__array__ of a value"),
    (wrong_launches.warps_by_iteration, (1, 3), 2, "of a value that torch computed"),
    (wrong_launches.warps_by_allclose, (1, 3), 2, "torch.allclose of a value"),
    (wrong_launches.warps_by_split, (1, 3), 2, "torch.tensor_split of a value"),
    (wrong_launches.warps_by_array_that_torch_fills, (1, 3), 2, "Tensor.numpy of a value"),
    (wrong_launches.grid_by_lengths, (1, 3), 2, "aten::_local_scalar_dense of a value"),
    (wrong_launches.reset_of_one, (1, 3), 1, "add_into"),
    (wrong_launches.reset_of_two, (1, 3), 1, "add_into"),
)


def certify(function, rows, **given):
    return isobit.certify(function, rows=rows, targets=("sm_90",), **given)


@pytest.mark.parametrize(
    ("function", "rows", "code", "said"), QUICK, ids=lambda one: getattr(one, "__name__", None)
)
@pytest.mark.sweep(5)
def test_one_kernel_of_each_cause_gets_no_certificate(function, rows, code, said):
    found = certify(function, rows)
    assert found.exit_code == code, str(found)
    assert said in " ".join(str(found).split())


@pytest.mark.parametrize(
    "name",
    [
        "wrong_calls.number_of_the_first_call",
        pytest.param("wrong_calls.weight_of_the_first_call", marks=pytest.mark.full),
        pytest.param("wrong_launches.cached_plan", marks=pytest.mark.full),
    ],
)
def test_what_the_first_call_chose_is_found_in_a_new_process_with_threads(name):
    module, function = name.split(".")
    program = (
        f"import isobit, threading\nfrom tests.certifying.{module} import {function}\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"found = isobit.certify({function}, rows=(1, 17), targets=('sm_90',))\n"
        "print(found.exit_code, ' '.join(str(found).split()))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith("2 "), done.stdout + done.stderr
    assert "keeps what it chose" in done.stdout


def test_a_first_call_that_could_not_be_seen_gets_no_certificate(monkeypatch):
    """In a copy of a process a function may wait for a thread that is not there."""
    monkeypatch.setattr("isobit.certifying.judging.scan.FIRST_CALL_SECONDS", 1)
    here = os.getpid()

    def waits_in_a_copy(rows):
        if os.getpid() != here:
            time.sleep(600)
        return right_kernels.positions(rows)

    found = certify(waits_in_a_copy, (1, 3))
    assert found.exit_code == 2
    assert "first call could not be seen in a copy" in " ".join(str(found).split())
    monkeypatch.delattr("os.fork")
    found = certify(right_kernels.positions, (1, 3))
    assert found.exit_code == 2
    assert "first call could not be seen in a copy" in " ".join(str(found).split())


def test_a_view_that_begins_later_is_another_binary():
    """A pointer that is not divisible by 16 is compiled for by itself."""
    found = certify(wrong_launches.alignment, (1, 17), vary={"offset": (0, 1)})
    assert found.exit_code == 1
    assert "depends on offset" in " ".join(str(found).split())


@pytest.mark.parametrize(("warps", "code"), [(4, 2), (2, 0)])
def test_fused_products_are_not_hidden_by_as_many_that_the_ptx_has(warps, code):
    """With 2 warps ptxas fuses nothing, so that names of this kernel hold."""
    make = partial(wrong_launches.open_products_next_to_fused, num_warps=warps)
    found = isobit.certify(lambda rows: make(rows), rows=(1, 3), targets=("sm_100",))
    assert found.exit_code == code, str(found)
    facts = [kernel for target in found.targets for kernel in target.kernels]
    assert facts
    assert all(kernel.open_products and kernel.fused for kernel in facts)
    assert [kernel.ptxas_fuses for kernel in facts] == [bool(code)] * len(facts)


def all_wrong():
    modules = (wrong_rows, wrong_launches, wrong_inputs, wrong_calls, wrong_values)
    for module in (*modules, more_wrong_kernels):
        for name, one in vars(module).items():
            if (
                inspect.isfunction(one)
                and one.__module__ == module.__name__
                and name not in NOT_WRONG
            ):
                rows = None if name in BY_DEFAULT else ROWS.get(name, (1, 17))
                yield pytest.param(one, rows, id=name)


@pytest.mark.full
@pytest.mark.parametrize(("function", "rows"), list(all_wrong()))
def test_no_wrong_kernel_gets_a_certificate(function, rows):
    try:
        found = certify(function, rows)
    except isobit.errors.IsobitError:
        return  # raised before anything was judged: there is no certificate
    assert found.exit_code in (1, 2), str(found)
    assert not found.kept


def test_there_are_as_many_wrong_kernels_as_are_said():
    assert len(list(all_wrong())) >= 79 + 40


RIGHT = (
    (right_kernels.positions, (1, 3)),
    (right_kernels.random_targets, (1, 3)),
    (right_kernels.scattered, (1, 3)),
    (right_kernels.block_table, (1, 3)),
    (right_kernels.gate_and_up, (1, 3)),
    (right_kernels.kept_workspace, (1, 3)),
    (right_kernels.maximum_of_each_row, (1, 3)),
    (right_kernels.drawn_words, (1, 3)),
    (right_kernels.waits, (1, 3)),
    (right_kernels.unfused, (1, 3)),
    (right_kernels.weight_from_outside, (1, 3)),
    (right_kernels.rounded_in_torch, (1, 3)),
    (right_kernels.one_scale, (1, 3)),
    (right_kernels.expanded_weight, (3, 5)),
    (right_kernels.int8_per_row, (1, 3)),
    (right_kernels.uint8_over_zeros, (1, 3)),
    (right_kernels.e5m2_as_bytes, (1, 3)),
    (right_kernels.int8_scales, (1, 3)),
    (right_kernels.partial_rotary, (1, 3)),
    (right_kernels.every_second_in_place, (1, 3)),
    (right_kernels.padded_by_zeros, (1, 3)),
    (right_kernels.filled_by_numpy, (1, 3)),
    (right_kernels.lengths_by_numpy, (1, 3)),
    (right_kernels.kept_staging, (1, 3)),
    (wrong_values.weight_by_exponentials, (1, 3)),
    (wrong_values.views_of_one_weight, (1, 3)),
    (wrong_values.numbers_of_all_kinds, (1, 3)),
    (wrong_values.weight_read_by_python, (1, 3)),
    (wrong_values.weight_after_draws_of_rows, (1, 3)),
)
SLOW_TO_REPEAT = {"weight_from_outside", "rounded_in_torch", "one_scale", "scattered", "waits"}


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        pytest.param(
            one, rows, marks=[pytest.mark.full] * (one.__name__ in SLOW_TO_REPEAT), id=one.__name__
        )
        for one, rows in RIGHT
    ],
)
@pytest.mark.sweep(3)
def test_right_twins_are_kept(function, rows):
    found = certify(function, rows)
    assert found.kept, str(found)
    assert found.targets[0].rows_compared == found.targets[0].rows == sum(rows)


def scan(function, rows=None):
    return scan_rows(Surveyed(function, "sm_90", plan(function, rows, {})).survey())


@pytest.mark.parametrize(
    "threshold", [131, 150, 255, 400, 1000, 2048, 5000, 16_384, 32_767, 59_000]
)
@pytest.mark.sweep(3)
def test_thresholds_between_131_and_60_000_rows_are_named(threshold):
    found = scan(more_wrong_kernels.warps_above(threshold))
    assert found.unjudged
    assert min(found.unjudged[0].rows) > threshold
    assert "num_warps=2" in str(found.unjudged[0])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (wrong_launches.split_k_above_256, "S=4"),
        (wrong_launches.split_k_at_200, "S=4"),
        (wrong_launches.persistent_carries_over, "the grid along x"),
        (more_wrong_kernels.splits_as_a_number, "splits of sum_parts follows another rule (4)"),
        (more_wrong_kernels.epsilon_of_large_batches, "epsilon of add_epsilon"),
        (wrong_rows.float_atomics_large_batches_only, ""),
        (wrong_calls.flag_of_large_batches, "first of sum_from_first follows another rule (1)"),
        (wrong_calls.as_many_tiles, "first of sum_from_first follows another rule (4)"),
        (wrong_calls.other_weight_of_large_batches, "w of scaled_rows"),
        (wrong_calls.second_axis_of_large_batches, "the grid along y of sum_by_programs"),
        (wrong_calls.rounded_in_large_batches, "x of scaled_rows is another tensor, or made in"),
        (wrong_calls.other_output_of_large_batches, "output 0 is another tensor"),
        (right_kernels.positions, ""),
        (right_kernels.gate_and_up, ""),
    ],
)
@pytest.mark.sweep(3)
def test_a_scan_names_what_other_row_counts_launch(function, said):
    found = scan(function)
    assert len(found.counts) > 40
    assert said in " ".join(map(str, found.unjudged))
    assert bool(said) == bool(found.unjudged)


@pytest.mark.full
def test_row_counts_that_launch_something_else_are_executed_if_nobody_chose():
    found = isobit.certify(wrong_launches.split_k_at_200, targets=("sm_90",))
    assert found.exit_code == 1
    assert 255 in found.rows


def test_row_counts_that_were_chosen_are_what_a_certificate_is_about():
    function = more_wrong_kernels.warps_above(5000)
    found = certify(function, (1, 3))
    assert found.exit_code == 0
    assert "Row counts tried: 1 and 3." in str(found)
    assert "Not judged: at 8,191 rows" in " ".join(str(found).split())


@pytest.mark.parametrize(
    "threshold",
    [
        pytest.param(number, marks=[pytest.mark.full] * (number != 5000))
        for number in (131, 150, 255, 400, 1000, 2048, 5000, 16_384, 32_767, 59_000)
    ],
)
def test_thresholds_inside_a_kernel_are_named(threshold):
    found = certify(more_wrong_kernels.branch_above(threshold), (3, 5))
    text = " ".join(str(found).split())
    # Compilers write count > 5000 as count >= 5001.
    passed = {f"a number of the launch passes {number:,} " for number in (threshold, threshold + 1)}
    assert any(each in text for each in passed)
    assert "more_wrong_kernels.py" in text
    whole = certify(more_wrong_kernels.branch_above(4), (3, 5))
    assert whole.exit_code == 1


def test_a_backward_pass_that_is_not_called_is_named():
    found = certify(wrong_launches.atomics_in_backward, (1, 3))
    assert found.exit_code == 0
    assert any("backward pass was not judged" in note for note in found.notes)
    assert certify(wrong_launches.atomics_in_backward_called, (1, 3)).exit_code == 1


def test_integers_that_a_setting_changes_are_not_left_uncompared():
    found = certify(more_wrong_kernels.splits_of_a_setting, (1, 3), vary={"splits": (1, 4)})
    assert found.exit_code == 2
    assert "splits=4" in str(found)
