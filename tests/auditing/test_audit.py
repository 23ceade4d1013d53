"""`isobit.audit` from a user's side: stock operators are named, isobit's are not, and mistakes are refused."""

import json
import sys
import threading

import pytest
import torch
from torch import nn

import isobit
from isobit.auditing.records import AXES
from isobit.auditing.report.json import audit_from_json
from isobit.auditing.subjects import capture_call, read_samples
from isobit.cli.main import main
from isobit.errors import ArgumentError


class SplitByRows(nn.Module):
    """A product whose order depends on the number of rows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        if x.shape[0] > 2:
            return x[..., :half] @ self.weight[:half] + x[..., half:] @ self.weight[half:]
        return x @ self.weight


def stock() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with one operator that mixes samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(16), isobit.nn.Linear(32, 8))
    return model.train(), torch.randn(6, 16, 32)


class Silu(nn.Module):
    """isobit's; torch's own gives the last elements of a tensor other bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return isobit.silu(x)


def ours() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(isobit.nn.Linear(32, 16), Silu(), isobit.nn.Linear(16, 8))
    return model, torch.randn(4, 5, 32)


def test_a_guilty_operator_is_named_with_its_effect():
    model, x = stock()
    report = isobit.audit(model, x, vary=("batch",))
    (one,) = report.guilty
    assert (one.place.operator, one.place.module, one.kind) == (
        "aten::native_batch_norm",
        "0",
        "error",
    )
    assert report.complete
    assert not report.kept
    assert report.exit_code == 1
    assert one.share == pytest.approx(1)
    assert one.first is not None
    assert one.first.run_bits != one.first.variant_bits


def test_isobits_operators_are_kept_on_every_axis_forward_and_backward():
    model, x = ours()
    for backward in (False, True):
        report = isobit.audit(model, x, vary=("batch", "threads", "repeat"), backward=backward)
        assert report.kept, str(report)
        assert all(axis.judged >= 3 for axis in report.axes)


def test_a_program_that_branches_on_the_batch_is_not_called_innocent():
    torch.manual_seed(0)
    report = isobit.audit(SplitByRows(), torch.randn(4, 64), vary=("batch",))
    assert not report.kept
    assert not report.complete
    assert "the program itself differs" in report.axes[0].why_not


def test_the_model_is_left_as_it_was():
    model, x = ours()
    before = isobit.bits.digest(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    hooks = len(model._forward_hooks)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    isobit.audit(model, x, vary=("batch", "threads", "repeat"))
    assert isobit.bits.digest(model) == before
    assert len(model._forward_hooks) == hooks
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert model[0].weight.grad is not None
    assert torch.is_grad_enabled()


def test_gradients_and_buffers_are_put_back():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(3, 2)).train()
    x = torch.randn(6, 4, 3)
    model(x).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    statistics = isobit.bits.digest(dict(model.named_buffers()))
    state = torch.get_rng_state()
    isobit.audit(model, x, vary=("batch", "repeat"), backward=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        isobit.bits.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True)
    )
    assert isobit.bits.digest(dict(model.named_buffers())) == statistics
    model(x)  # the statistics do change in a plain run
    assert isobit.bits.digest(dict(model.named_buffers())) != statistics


def test_the_error_of_isobits_operator_stands_beside_both_others():
    torch.manual_seed(0)
    model = nn.Linear(512, 256)
    (one,) = isobit.audit(model, torch.randn(64, 512), vary=("batch",)).guilty or (None,)
    if one is None:
        pytest.skip("this machine's products do not depend on the batch at this size")
    errors = one.accuracy
    assert errors.reference == "fp64"
    assert 0 <= errors.isobit <= 1
    assert 0 <= errors.run <= 1


class Loss(nn.Module):
    """A clean layer, its logits, and the loss over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = isobit.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def test_a_loss_over_all_samples_is_said_not_to_be_compared():
    (axis,) = isobit.audit(Loss(), (torch.randn(4, 8), torch.arange(4)), vary=("batch",)).axes
    assert axis.complete
    assert axis.not_compared == ("loss",)
    assert [one.place.operator for one in axis.unjudged] == ["aten::nll_loss_forward"]
    assert not axis.guilty


@pytest.mark.parametrize("draw", [lambda x: torch.randn(x.shape), lambda x: torch.randperm(len(x))])
def test_numbers_that_are_drawn_are_named_on_the_repeat_axis(draw):
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = draw(x)
            return x + drawn.to(x.dtype).view(len(x), -1)[:, :1]

    (one,) = isobit.audit(Draws(), torch.randn(50, 3), vary=("repeat",)).guilty
    assert one.kind == "random"


def test_complex_numbers_are_not_called_innocent():
    class Fourier(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs()

    (axis,) = isobit.audit(Fourier(), torch.randn(4, 16), vary=("batch",)).axes
    assert "complex numbers" in axis.unjudged[0].reason


def test_the_users_batch_is_not_written_to():
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(0.5)

    x = torch.ones(3, 4)
    isobit.audit(Writes(), x, vary=("repeat",))
    assert x.unique().tolist() == [1.0]


@pytest.mark.parametrize("named", [{"effect": "grad"}, {"effect": "loss"}, {"effect": "logp"}])
def test_an_effect_that_cannot_be_measured_is_refused(named):
    model, x = ours()
    with pytest.raises(ArgumentError):
        isobit.audit(model, x, vary=("batch",), **named)


def test_an_effect_that_the_model_does_not_return_is_refused():
    model, x = ours()
    with pytest.raises(
        ArgumentError, match=r"logp, loss, grad, or an output of the model \(output\)"
    ):
        isobit.audit(model, x, vary=("batch",), effect="logit")
    assert isobit.audit(model, x, vary=("batch",), effect="output").kept


def test_an_error_in_the_model_leaves_no_mode_behind():
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 1:
                raise RuntimeError("one sample only")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="one sample only"):
        isobit.audit(Fails(4, 4), torch.randn(3, 4), vary=("batch",))
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()


def test_two_threads_audit_at_once():
    model, x = stock()
    found = []

    def run() -> None:
        torch.manual_seed(1)
        found.append([g.place.operator for g in isobit.audit(model, x, vary=("batch",)).guilty])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["aten::native_batch_norm"]] * 2


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"vary": ()}, "axes among"),
        ({"vary": "batch"}, "axes among"),
        ({"vary": ("bach",)}, "axes among"),
        ({"blame": "all"}, "blame: one of"),
        ({"sample": 6}, "a sample from 0 to 5"),
        ({"sample": -1}, "a sample from 0 to 5"),
    ],
)
def test_mistakes_are_refused(named, expected):
    model, x = stock()
    with pytest.raises(ArgumentError, match=expected) as raised:
        isobit.audit(model, x, **named)
    assert str(raised.value).startswith("isobit.audit: ")


@pytest.mark.parametrize("batch", [{}, (), {"x": 3}, torch.tensor(1.0)])
def test_a_batch_without_samples_is_refused(batch):
    with pytest.raises(ArgumentError, match="first dimension is the samples"):
        isobit.audit(stock()[0], batch)


def test_a_frozen_model_has_no_backward_to_audit():
    model, x = ours()
    with pytest.raises(ArgumentError, match="requires a gradient"):
        isobit.audit(model.requires_grad_(False), x, vary=("batch",), backward=True)


def test_axes_that_do_not_apply_are_skipped_with_a_reason_and_never_kept():
    model, x = ours()
    report = isobit.audit(model, x[:1], vary=("batch", "padding", "decode", "repeat"))
    assert [one.axis for one in report.skipped] == ["batch", "padding", "decode"]
    assert all(one.reason for one in report.skipped)
    assert not report.kept
    assert report.exit_code == 2


def test_every_axis_has_a_name_that_the_command_takes():
    model, x = ours()
    report = isobit.audit(model, x, vary=AXES)
    done = {one.axis for one in report.axes} | {one.axis for one in report.skipped}
    assert done == set(AXES)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-40])
def test_unusual_numbers_raise_no_false_alarm(value):
    model, x = ours()
    x[:, 0, 0] = value
    assert isobit.audit(model, x, vary=("batch",)).kept


def test_reports_are_saved_in_every_form(tmp_path):
    model, x = stock()
    report = isobit.audit(model, x, vary=("batch",))
    for suffix in ("html", "json", "sarif", "txt"):
        report.save(tmp_path / f"audit.{suffix}")
    assert "native_batch_norm" in (tmp_path / "audit.html").read_text()
    assert json.loads((tmp_path / "audit.sarif").read_text())["runs"][0]["results"]
    again = audit_from_json((tmp_path / "audit.json").read_text())
    assert again.guilty[0].place == report.guilty[0].place
    with pytest.raises(ArgumentError, match=r"\.html"):
        report.save(tmp_path / "audit.pdf")


def test_a_script_is_run_until_its_model_is_called(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(8, int(sys.argv[1]))\n"
        "for step in range(3):\n"
        "    model(torch.full((2, 8), float(step))).sum().backward()\n"
        "raise SystemExit('ran to its end')\n"
    )
    before = list(sys.argv), nn.Module.__call__
    made = capture_call(script, ["4"], wanted=1)
    assert made.model.out_features == 4
    assert made.args[0].unique().tolist() == [1.0]
    assert (list(sys.argv), nn.Module.__call__) == before
    with pytest.raises(ArgumentError, match="after 3 such calls"):
        capture_call(script, ["4"], wanted=7)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 999999999]}\n')
    assert main(["audit", "qwen3-tiny", "--inputs", str(path), "--quiet"]) == 2
    assert "vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "{}", "{", '{"input_ids": []}', '{"input_ids": [-1]}', '{"prompt": "text"}', "3"),
        *('{"input_ids": [true]}', '{"input_ids": [1.5]}', '{"input_ids": "12"}'),
        '{"input_ids": [' + "9" * 30 + "]}",
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=lambda line: line[:30],
)
def test_hostile_inputs_files_are_refused_by_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(ArgumentError, match="line 2"):
        read_samples(path, None)
