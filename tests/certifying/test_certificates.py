"""Theorem: a certificate is kept only if every row of every configuration has one expression; each wrong kernel fails.

All subjects are in certify_subjects.py. They are compiled and executed for one target, without a GPU.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import isobit
from isobit.certifying.records import BROKEN, EXECUTED, REFUSED
from isobit.errors import ArgumentError
from tests.certifying import certify_subjects as subjects

ROWS = (1, 3, 5)


def certify(function, rows=ROWS, **given):
    return isobit.certify(function, rows=rows, targets=("sm_80",), **given)


def only_target(found):
    (target,) = found.targets
    return target


@pytest.mark.parametrize(
    ("function", "per_row"),
    [
        (subjects.sums, 1),
        (subjects.norm, 64),
        (subjects.two_launches, 64),
        (subjects.columns, 1),
        (subjects.transposed, 1),
        (subjects.flattened, 4),
    ],
)
def test_right_kernels_have_one_expression(function, per_row):
    found = certify(function)
    assert found.kept
    assert found.exit_code == 0
    assert found.names == sum(ROWS) * per_row
    assert {outcome.verdict for outcome in only_target(found).outcomes} == {EXECUTED}
    assert all(o.bits_equal == o.bits_rows for o in only_target(found).outcomes)


def test_a_copy_of_a_file_is_shown_in_its_own_place(tmp_path, monkeypatch):
    """Triton's cache does not look at paths; the lines that are shown are those of the file that was given."""
    monkeypatch.chdir(tmp_path)
    for folder in ("first", "second"):
        copy = tmp_path / folder / "copied_subjects.py"
        copy.parent.mkdir()
        copy.write_text(Path(subjects.__file__).read_text())
        found = certify(load_module(copy).norm, rows=(1,), vary={"num_warps": (1, 4)})
        (parting,) = only_target(found).partings
        assert parting.left_step.source[0] == f"{folder}/copied_subjects.py"


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_warps_change_the_order_of_a_sum_and_it_is_shown_where():
    found = certify(subjects.norm, rows=(1, 3), vary={"num_warps": (1, 4)})
    target = only_target(found)
    assert found.exit_code == 1
    assert [len(one.members) for one in target.classes] == [2, 2]
    (parting,) = target.partings
    for step in (parting.left_step, parting.right_step):
        assert step.operation == "add.rn.f32"
        assert step.source[0].endswith("certify_subjects.py")
        assert "tl.sum" in step.python
        assert "add.rn.f32" in step.ptx
    assert "x[0]·x[0]" in parting.left_step.text
    assert parting.left_step.text != parting.right_step.text
    trees = [one.tree for one in target.classes]
    assert sorted(terms(trees[0])) == sorted(terms(trees[1])) == list(range(64))
    assert trees[0] != trees[1]


def terms(branch):
    return [branch] if isinstance(branch, int) else [t for part in branch for t in terms(part)]


def test_rows_chosen_by_a_heuristic_are_two_expressions():
    found = certify(subjects.warps_by_rows)
    first, second = only_target(found).classes
    assert [one.rows for one in first.configurations] == [1]
    assert [one.rows for one in second.configurations] == [3, 5]
    assert found.exit_code == 1


def test_every_configuration_of_the_autotuner_is_judged():
    found = certify(subjects.tuned, rows=(1, 3))
    outcomes = only_target(found).outcomes
    assert len(outcomes) == 4
    assert {dict(one.configuration.autotune)["tuned_kernel"] for one in outcomes} == {
        "num_warps=1 num_stages=3",
        "num_warps=4 num_stages=3",
    }
    assert len(found.classes) == 2


def test_a_row_that_reads_another_row_is_broken():
    found = certify(subjects.reads_row_zero)
    alone, *batched = only_target(found).outcomes
    assert alone.verdict == EXECUTED
    assert {one.verdict for one in batched} == {BROKEN}
    assert "depend on another row" in batched[0].reason
    assert found.exit_code == 1


def test_outputs_that_are_not_written_are_broken():
    found = certify(subjects.half_written)
    outcome = only_target(found).outcomes[0]
    assert (outcome.verdict, outcome.unwritten) == (BROKEN, 32)
    assert "not written" in outcome.reason
    assert found.exit_code == 1


def test_atomics_on_floats_are_broken():
    found = certify(subjects.atomic, rows=(1, 3))
    assert {one.verdict for one in only_target(found).outcomes} == {BROKEN}
    assert found.exit_code == 1


def test_an_access_outside_a_buffer_is_broken():
    found = certify(subjects.out_of_bounds, rows=(1, 3))
    outcome = only_target(found).outcomes[0]
    assert outcome.verdict == BROKEN
    assert "address inside" in outcome.reason
    assert "certify_subjects.py" in outcome.where
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        (subjects.data_branch, "float data", "certify_subjects.py"),
        (subjects.torch_between, "aten::sum", ""),
        (subjects.changes_input, "aten::mul_", ""),
        (subjects.not_written, "no kernel wrote it", ""),
        (subjects.padded, "[16, 64] at 1 rows", ""),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(function, said, line):
    found = certify(function, rows=(1, 3))
    outcome = only_target(found).outcomes[0]
    assert outcome.verdict == REFUSED
    assert said in outcome.reason
    assert line in outcome.where
    assert outcome.remedy
    assert found.exit_code == 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (subjects.raises, "ValueError at certify_subjects.py"),
        (subjects.nothing, "no launch"),
        (subjects.on_cuda, "CUDA"),
    ],
)
def test_functions_that_do_not_run_raise(function, said):
    with pytest.raises(ArgumentError, match=said):
        certify(function)


@pytest.mark.parametrize(
    "given",
    [
        {"rows": (0,)},
        {"rows": ()},
        {"rows": (1.5,)},
        {"vary": {"num_warp": (1,)}},
        {"vary": {"num_warps": ()}},
        {"targets": ("sm_70",)},
    ],
)
def test_wrong_arguments_raise(given):
    with pytest.raises(ArgumentError):
        isobit.certify(subjects.sums, **{"rows": ROWS, "targets": ("sm_80",), **given})


def test_rows_with_other_integers_are_compared_with_their_like():
    found = certify(subjects.by_integers)
    assert found.kept
    # Rows 3 and 4 are in one configuration only: they are compared with themselves at another position.
    assert found.names == 1 + 3 + 5
    assert "in 9 of 9 rows" in " ".join(str(found).split())


def test_one_configuration_alone_is_not_kept():
    found = certify(subjects.sums, rows=(1,))
    assert (found.kept, found.exit_code, found.names) == (False, 2, 0)
    assert any("nothing was compared" in note for note in found.notes)


def test_a_function_without_rows_compares_whole_outputs():
    found = isobit.certify(subjects.no_rows, vary={"num_warps": (1, 4)}, targets=("sm_80",))
    assert len(found.classes) == 2
    assert found.rows == ()


def test_inputs_that_torch_combined_are_not_certified():
    found = certify(subjects.scaled, rows=(1, 3))
    assert found.exit_code == 2
    assert "aten::max" in only_target(found).outcomes[0].reason


def test_static_facts_and_digests():
    found = certify(subjects.norm, rows=(1, 3))
    kernel = only_target(found).kernels[0]
    assert kernel.registers
    assert kernel.spill_bytes == 0
    assert (kernel.fused, kernel.fusion_allowed, kernel.open_products) == (0, False, 0)
    assert len(kernel.digest) == len(found.classes[0].digest) == 32
    assert found.to_dict()["kept"] is True
    again = certify(subjects.norm, rows=(1, 3))
    assert again.classes[0].digest == found.classes[0].digest


def test_fusion_changes_the_expression_and_the_facts():
    found = certify(subjects.fusing, rows=(1, 3), vary={"fused": (True, False)})
    assert len(found.classes) == 2
    facts = {kernel.fusion_allowed: kernel.fused for kernel in only_target(found).kernels}
    assert facts[True] > 0
    assert facts[False] == 0


def test_fp32_has_one_expression_on_all_targets():
    found = isobit.certify(subjects.chain, rows=(1, 3))
    assert found.groups == (("sm_80", "sm_90", "sm_100"),)


def test_saved_forms_and_ptx(tmp_path):
    found = certify(subjects.sums, rows=(1, 3), ptx=tmp_path / "ptx")
    for suffix in (".html", ".json", ".txt"):
        found.save(tmp_path / f"certificate{suffix}")
        assert (tmp_path / f"certificate{suffix}").stat().st_size
    with pytest.raises(ArgumentError):
        found.save(tmp_path / "certificate.pdf")
    (text,) = (tmp_path / "ptx").iterdir()
    assert ".entry" in text.read_text()
    assert only_target(found).kernels[0].digest[:12] in text.name


def test_progress_and_everything_is_put_back():
    from triton.runtime import autotuner, jit

    before = jit.JITFunction.run, autotuner.Autotuner.run, torch.get_rng_state()
    steps = []
    certify(subjects.sums, rows=(1, 3), progress=lambda *step: steps.append(step))
    assert steps[-1][1:] == (2, 2)
    assert (jit.JITFunction.run, autotuner.Autotuner.run) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_no_expression_is_listed_that_no_judged_row_has():
    """Rows that read row 0 break every configuration with several rows; what they would compute is no class."""
    found = certify(subjects.reads_row_zero)
    target = only_target(found)
    assert {one.verdict for one in target.outcomes} == {EXECUTED, BROKEN}
    assert target.classes
    assert all(one.members for one in target.classes)
    found = certify(subjects.reads_row_zero, rows=(3, 5))
    assert only_target(found).classes == ()
    assert found.exit_code == 1
