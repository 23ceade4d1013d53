"""On the axis `compile`, modules whose compiled result has other bits are named; others stay silent.

Planted modules ask whether they are being compiled, so that a backend without code generation shows them at once.
"""

import pytest
import torch
from torch import nn

import isobit
from isobit.auditing.auditor import AuditOptions
from isobit.auditing.axes.axes import NotApplicableError
from isobit.auditing.axes.compiled_axis import CompiledAudit
from isobit.auditing.subjects import as_inputs


class Planted(nn.Module):
    """Give another result when compiled: round twice more, or scale it."""

    def __init__(self, kind="order"):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "clean" or not torch.compiler.is_compiling():
            return self.sum(x)
        if self.kind == "error":
            return self.sum(x) * 1.01
        return x + (self.sum(x.flip(-1)) - x.flip(-1))

    def sum(self, x):
        total = x[..., 0]
        for at in range(1, x.shape[-1]):
            total = total + x[..., at]
        return x + total[..., None]


class Layer(nn.Module):
    """Two children, and an operator of its own."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), Planted(kind)

    def forward(self, x):
        return x + self.outer(self.inner(x))


class Residual(nn.Module):
    """An operator of its own that differs when it is compiled, around a child that does not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        y = self.inner(x)
        return (y + x + 1.0) if torch.compiler.is_compiling() else (y + (x + 1.0))


class Writes(nn.Module):
    """Write to the input."""

    def forward(self, x):
        return x.add_(1.0 if torch.compiler.is_compiling() else 2.0)


def made(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for layer in layers])


def audit(model, backend="eager", budget=120.0, x=None):
    torch._dynamo.reset()
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)) if x is None else x
    with torch.no_grad():
        return CompiledAudit(as_inputs(model, x), AuditOptions(), budget, backend).report()


def named(report):
    return {one.place.module: one.kind for one in report.guilty}


@pytest.mark.parametrize("kind", ["order", "error"])
def test_exactly_the_planted_module_is_named(kind):
    model = made(lambda: Layer("clean"), lambda: Layer(kind), lambda: Layer("clean"))
    report = audit(model)
    assert named(report) == {"1.outer": kind}
    assert report.complete
    assert report.guilty[0].share == pytest.approx(1)
    assert "test_compiled_axis.py" in report.guilty[0].place.source


def test_a_clean_model_is_silent():
    report = audit(made(lambda: Layer("clean"), lambda: Layer("clean")))
    assert not report.guilty
    assert report.complete
    assert report.judged
    assert "into 1 graph" in report.variation


def test_a_model_that_is_left_eager_is_said_to_be():
    class Eager(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return x + 1.0

    report = audit(Eager())
    assert not report.guilty
    assert "compiles none of it" in report.variation


def test_a_module_that_its_children_do_not_explain_is_named_itself():
    report = audit(made(lambda: Layer("clean"), Residual))
    assert named(report) == {"1": "order"}
    assert report.complete


def test_layers_of_one_kind_are_compiled_once_and_both_named():
    report = audit(made(lambda: Layer("order"), lambda: Layer("order")))
    assert set(named(report)) == {"0.outer", "1.outer"}
    assert sum(one.share for one in report.guilty) == pytest.approx(1)
    assert report.complete


def test_layers_that_differ_in_a_number_only_are_not_taken_for_each_other():
    class Numbered(nn.Module):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x):
            return x * (self.layer_idx + 1)

    model = made(lambda: Numbered(0), lambda: Numbered(1), lambda: Planted("order"))
    assert named(audit(model)) == {"2": "order"}


def test_what_is_not_compiled_in_time_is_not_judged():
    report = audit(made(lambda: Layer("order"), lambda: Layer("clean")), budget=0.0)
    assert {one.reason for one in report.unjudged} == {"it was not compiled within 0 seconds"}
    assert set(named(report)) == {""}  # all that is known: the whole model differs


def test_a_module_that_writes_to_its_input_is_not_judged():
    report = audit(made(lambda: nn.Linear(16, 16), Writes))
    assert [one.place.module for one in report.unjudged] == ["1"]
    assert "writes to its inputs" in report.unjudged[0].reason


def test_random_numbers_are_told_from_rounding():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x) + (1.0 if torch.compiler.is_compiling() else 0.0)

    assert named(audit(made(lambda: nn.Linear(16, 16), Noise))) == {"1": "random"}


def test_a_model_that_cannot_be_compiled_is_skipped():
    with pytest.raises(NotApplicableError, match="the model cannot be compiled"):
        audit(made(Planted), backend="no such backend")
    report = isobit.audit(made(Planted), torch.randn(2, 16), vary=("compile",), backward=True)
    assert "backward" in report.skipped[0].reason


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_inductor_fuses_roundings_of_bf16_and_leaves_isobit_alone():
    torch._dynamo.reset()
    model = made(lambda: isobit.nn.Linear(16, 16), nn.Tanhshrink).to(torch.bfloat16)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    report = isobit.audit(model, x, vary=("compile",))
    assert named(report) == {"1": "order"}
    assert report.complete
