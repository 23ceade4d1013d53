"""Theorem: rows are followed through every exact function, so that all of it is judged and the list is complete.

Each function gives a sample the same bits alone and in a batch. An audit of it must name nothing, leave nothing without
a verdict, and find the substituted run to be the variant; with a backward pass, too, where gradients are exact.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isobit

SAMPLES, TOKENS, WIDTH = 5, 6, 8


def by_index(x):
    flat = x.reshape(-1, WIDTH)
    order = flat[:, 0].argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (flat[order] * 2)[back].view(x.shape)


def index_added(x):
    flat = x.reshape(-1, WIDTH)
    order = flat[:, 0].argsort(stable=True)
    return torch.zeros_like(flat).index_add(0, order, flat[order]).view(x.shape)


def put_back(write, make=torch.zeros_like):
    """Sort rows by a key, as a mixture of experts does, and write the results back to their places."""

    def call(x):
        flat = x.reshape(-1, WIDTH)
        order = flat[:, 0].argsort(stable=True)
        rows = flat[order] * 2
        return write(make(rows), order, rows).view(x.shape)

    return call


def in_two_parts(out, order, rows):
    half = len(order) // 2
    out[order[:half]] = rows[:half]
    out[order[half:]] = rows[half:]
    return out


def expanded(order, rows):
    return order[:, None].expand_as(rows)


WRITES = {
    "index_put_": lambda out, order, rows: out.index_put_((order,), rows),
    "index_put": lambda out, order, rows: out.index_put((order,), rows),
    "index_copy_": lambda out, order, rows: out.index_copy_(0, order, rows),
    "scatter_": lambda out, order, rows: out.scatter_(0, expanded(order, rows), rows),
    "in two parts": in_two_parts,
}
ADDS = {
    "index_put_, added": lambda out, order, rows: out.index_put_((order,), rows, accumulate=True),
    "scatter_add_": lambda out, order, rows: out.scatter_add_(0, expanded(order, rows), rows),
    "top 2": lambda out, order, rows: out.index_put_(
        (torch.cat([order, order.flip(0)]),), torch.cat([rows, rows.flip(0)]), accumulate=True
    ),
}


def masked_rows(x):
    flat = x.reshape(-1, WIDTH)
    out = torch.zeros_like(flat)
    for positive in (True, False):
        (rows,) = torch.where((flat[:, 0] > 0) == positive)
        out = out.index_add(0, rows, flat[rows] * (2 if positive else 4))
    return out.view(x.shape)


def written_slices(x):
    y = x.clone()
    y[:, 1:] -= x[:, :-1] * 2
    y[:, 0].clamp_(-1, 1)
    return y


FUNCTIONS = {
    "transposed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0) * 2,
    "flattened": lambda x: (x.reshape(-1, WIDTH) * 2).view(x.shape),
    "flipped twice": lambda x: (x.flip(0) * 2).flip(0),
    "rolled back": lambda x: (x.roll(2, 0) * 2).roll(-2, 0),
    "split": lambda x: torch.cat([part * 2 for part in x.split(2)]),
    "stacked": lambda x: torch.stack(list(x.unbind(0))) * 2,
    "time-major": lambda x: (
        (x.transpose(0, 1).reshape(-1, WIDTH) * 2).view(TOKENS, -1, WIDTH).transpose(0, 1)
    ),
    "padded tokens": lambda x: F.pad(x, (0, 0, 2, 1)) * 2,
    "padded features": lambda x: F.pad(x, (1, 3))[..., 1:9] * 2,
    "expanded": lambda x: x * torch.arange(1.0, 1 + TOKENS)[None, :, None].expand(len(x), -1, -1),
    "unfolded": lambda x: x.unfold(1, 2, 1).amax(-1),
    "by index": by_index,
    "added by index": index_added,
    "rows of experts": masked_rows,
    "written slices": written_slices,
    **{f"put back by {name}": put_back(write) for name, write in (WRITES | ADDS).items()},
    **{f"{name} into empty": put_back(write, torch.empty_like) for name, write in WRITES.items()},
    **{f"{name} over rows": put_back(write, torch.clone) for name, write in WRITES.items()},
}


class Function(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.call(x * self.scale + self.shift)


def hidden():
    """Small whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-8, 9, (SAMPLES, TOKENS, WIDTH), generator=generator).float()


@pytest.mark.parametrize("sample", [0, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_followed(name, sample):
    report = isobit.audit(Function(FUNCTIONS[name]), hidden(), vary=("batch",), sample=sample)
    (axis,) = report.axes
    assert [(str(one.place), one.reason) for one in axis.unjudged] == []
    assert report.kept, axis.why_not


# Their backward writes zeros over rows, or rows of parts, of which none says whose they are.
LOST_IN_BACKWARD = [name for name in FUNCTIONS if "over rows" in name or "in two parts" in name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_followed(name):
    report = isobit.audit(Function(FUNCTIONS[name]), hidden(), vary=("batch",), backward=True)
    (axis,) = report.axes
    if name in LOST_IN_BACKWARD:
        assert axis.unjudged
        assert not report.guilty
        assert not report.kept
        return
    assert [(str(one.place), one.reason) for one in axis.unjudged] == []
    assert axis.complete, axis.why_not
    assert {g.place.operator for g in axis.guilty} <= {"aten::sum"}  # of the shift, over samples


def test_a_row_of_another_sample_is_never_innocent():
    def shifted(x):
        return torch.cat([x[-1:], x[:-1]])

    report = isobit.audit(Function(shifted), hidden(), vary=("batch",))
    assert not report.complete
    assert "another order" in report.axes[0].why_not


@pytest.mark.parametrize("name", WRITES | ADDS)
def test_rows_written_to_other_samples_are_never_innocent(name):
    write = (WRITES | ADDS)[name]
    wrong = put_back(lambda out, order, rows: write(out, order.roll(TOKENS), rows))
    report = isobit.audit(Function(wrong), hidden(), vary=("batch",))
    assert not report.kept
    assert report.exit_code != 0


@pytest.mark.parametrize("name", ADDS)
def test_rows_added_to_those_of_other_samples_are_never_innocent(name):
    report = isobit.audit(Function(put_back(ADDS[name], torch.clone)), hidden(), vary=("batch",))
    assert not report.kept
    assert report.exit_code != 0


def unstable(x):
    """Sort samples' tokens together by few keys: equal keys come in an order that depends on their number."""
    flat = x.reshape(-1, WIDTH)
    _, order = torch.sort((flat[:, 0] > 0).int(), descending=True)
    weight = torch.arange(1.0, 1 + WIDTH)
    return (flat[order] * weight)[order.argsort()].view(x.shape)


def test_ties_of_a_sort_are_an_order():
    x = torch.cat([hidden()] * 40)
    report = isobit.audit(Function(unstable), x, vary=("batch",), sample=7)
    assert {(g.place.operator, g.kind) for g in report.guilty} == {("aten::sort", "order")}
    assert report.complete, report.axes[0].why_not
