"""Theorem: the parts of an audit do what its completeness rests on: outputs, shares, sums over samples, replays."""

import itertools

import pytest
import torch
from torch import nn

import isobit
from isobit.auditing.axes.outcomes import in_order
from isobit.auditing.judging.blame import as_vectors
from isobit.auditing.judging.effects import Quantity, choose, outputs_of
from isobit.auditing.labels.labels import EVERY, Labels, Rows, cut
from isobit.auditing.replay.call import TensorSpec, flatten, results_of, written_by
from isobit.auditing.replay.merging import Parts, is_sum_of_samples, merge_parts
from isobit.auditing.replay.replay import Keeper, Player, has_no_overlap, settle
from isobit.gates.model.models import build_model
from isobit.library.audit.clean import text

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("labels", "right"),
    [
        ([0, 1, 2], True),
        ([0, 0, 1, 1], True),
        ([0, 1, 2, 0, 1, 2], True),
        ([EVERY, 0, 1, EVERY], True),
        ([2, 1, 0], False),
        ([2, 0, 1], False),
        ([0, 2, 1], False),
    ],
)
def test_rows_in_the_order_of_the_inputs(labels, right):
    assert in_order(Labels(torch.tensor(labels))) is right


def test_every_tensor_and_number_of_an_output_is_found():
    out = {"a": torch.ones(2), "b": (torch.tensor([1]), 3, True, None)}
    assert sorted(outputs_of(out)) == ["a", "b.0", "b.1", "b.2"]
    assert choose({"x": torch.tensor([1]), "y": torch.ones(1)}, None) == "y"


class Counting(nn.Module):
    """A right result, and beside it whole numbers that count all samples."""

    def forward(self, x):
        return x * 2, (x > 0).sum()


def test_whole_numbers_that_depend_on_the_batch_are_not_innocent():
    report = isobit.audit(Counting(), torch.ones(4, 3), vary=("batch",))
    assert not report.kept
    assert report.exit_code != 0


@pytest.mark.parametrize(
    "points",
    [
        ([1.0, 2.0], [1.0, 3.0], [0.5, 3.0]),
        ([float("nan"), 2.0], [1.0, 2.0], [1.0, 2.5]),
        ([0.0, 0.0], [-0.0, 0.0], [-0.0, -0.0]),
        ([float("inf"), 1.0], [float("-inf"), 1.0], [3.0, 1.0]),
    ],
)
def test_shares_add_up_to_one(points):
    numbers = [Quantity("x", torch.tensor(p, dtype=torch.float64)) for p in points]
    first, *_, last = vectors = as_vectors(numbers)
    whole = last - first
    steps = [b - a for a, b in itertools.pairwise(vectors)]
    assert sum(float(step @ whole) for step in steps) / float(whole @ whole) == pytest.approx(1)


def test_parts_of_a_sum_follow_its_views_and_end_with_it():
    parts, whole = Parts(), torch.zeros(3, 4)
    pieces = [torch.randn(3, 4) for _ in range(2)]
    parts.put(whole, pieces)
    for view in (lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t.view(2, 6)):
        for found, piece in zip(parts.get(view(whole)), pieces, strict=True):
            assert torch.equal(found, view(piece))
    assert parts.get(torch.zeros(3, 4)) is None


def test_sums_are_merged_in_the_dtype_of_their_parts():
    wide = [torch.tensor([1.0]), torch.tensor([2.0**-9]), torch.tensor([2.0**-9])]
    assert float(merge_parts(wide, False, torch.bfloat16)) == 1.0
    assert float(merge_parts([w.bfloat16() for w in wide], False, torch.bfloat16)) == 1.0
    assert is_sum_of_samples(4, 5000)
    assert is_sum_of_samples(3, 256)
    assert not is_sum_of_samples(3, 257)


def test_replays_have_the_strides_of_the_variant():
    part = torch.randn(3, 4)
    sliced = TensorSpec((3, 4), (10, 1), torch.float32, part.device)
    assert settle(part, sliced).stride() == (10, 1)
    assert torch.equal(settle(part, sliced), part)
    assert not has_no_overlap(TensorSpec((3, 4), (1, 1), torch.float32, part.device))
    assert not has_no_overlap(TensorSpec((3, 4), (0, 1), torch.float32, part.device))


def test_rows_are_cut_by_label():
    labels = Labels(torch.tensor([0, 1, 0, EVERY, 1]))
    x = torch.arange(5)
    assert cut(x, {0: labels}, Rows([0])).tolist() == [0, 2, 3]
    assert cut(x, {0: labels}, Rows([0]), (5,)).tolist() == [0, 2, 3]
    assert cut(x, {0: labels}, Rows([0], [0, 1]), (5,)).tolist() == [0, 1, 2, 3, 4]


@torch.library.custom_op("tested::write_half", mutates_args=("out",))
def write_half(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 0.5)


def test_written_arguments_are_results():
    func, x, out = torch.ops.tested.write_half.default, torch.ones(2), torch.zeros(2)
    flat, spec = flatten(func, (x, out), {})
    assert written_by(func) == ([1], [1])
    assert results_of(func, flat, spec, None)[0] is out
    assert written_by(aten.add_.Tensor) == ([0], [])
    assert written_by(aten.add.Tensor) == ([], [])


def test_kept_results_are_played_back():
    with Keeper({0}) as keeper:
        first = torch.rand(4) + 1
    with Player(keeper.kept):
        again = torch.rand(4) + 1
    assert torch.equal(first, again)
    with Player({0: ("aten::other", [torch.zeros(4)])}):
        assert bool((torch.rand(4) + 1 > 1).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(11, 8, 9), (9, 7, 5, 6), (11, 8, 9, 6, 5)])
@pytest.mark.sweep(3)
def test_gradients_of_isobit_do_not_depend_on_the_batch(lengths, dtype):
    model = isobit.enable(build_model("llama-tiny", dtype))
    inputs = text(model.config.vocab_size, lengths)
    report = isobit.audit(model, inputs, vary=("batch",), backward=True)
    assert [str(g.place) for g in report.guilty] == []
    assert report.kept, report.axes[0].why_not


def test_one_samples_part_of_a_long_segment_is_not_judged():
    model = isobit.enable(build_model("llama-tiny", torch.float32))
    inputs = text(model.config.vocab_size, (3, 300, 5))
    report = isobit.audit(model, inputs, vary=("batch",), backward=True)
    assert not report.complete
    assert any("is not defined" in one.reason for one in report.unjudged)
