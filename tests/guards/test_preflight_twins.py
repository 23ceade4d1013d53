"""Each check of a preflight finds its planted bug, by name, and is made and silent on the right twin.

1. Twins: exactly the rule is found in the wrong program; in the right one the check was made and found nothing.
2. Right programs of other shapes are clean.
3. What a message names: weights found and expected, workers, the file and its tensors.
4. A check that cannot be made says why.
5. `micro_batch_invariance` and `check_checkpoint`, on a user's own loss and file.
"""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loaders

from isobit import ArgumentError
from isobit.guards import check_checkpoint, micro_batch_invariance, preflight
from tests.guards.preflight_more_right import MORE_RIGHT
from tests.guards.preflight_programs import loop, plain, sgd
from tests.guards.preflight_twins import (
    TWINS,
    Centred,
    mean_per_micro_batch,
    one_tensor_corrupt,
)
from tests.guards.preflight_whole_runs import WHOLE_RUN_RIGHT, WHOLE_RUN_TWINS, adversaries
from tests.guards.watched_programs import net

EVERY_TWIN = TWINS | WHOLE_RUN_TWINS


def run(program, folder, **given):
    needs_folder = "folder" in inspect.signature(program).parameters
    return preflight(lambda: program(**given, **({"folder": folder} if needs_folder else {})))


@pytest.mark.filterwarnings("ignore:Using a target size")  # the planted bug, which torch warns of
@pytest.mark.filterwarnings("ignore:.*spectral_norm")  # the older one
@pytest.mark.parametrize("program", EVERY_TWIN, ids=lambda p: p.__name__)
def test_twins(program, tmp_path):
    rule, check = EVERY_TWIN[program]
    found = run(program, tmp_path, wrong=True)
    assert {finding.rule for finding in found.findings} == {rule}, found.findings
    found = run(program, tmp_path, wrong=False)
    assert found.findings == ()
    assert check in found.judged, found.not_judged


@pytest.mark.parametrize("program", MORE_RIGHT + WHOLE_RUN_RIGHT, ids=lambda p: p.__name__)
def test_more_right_programs(program, tmp_path):
    found = run(program, tmp_path)
    assert found.findings == ()
    assert found.steps == (15 if "five_steps" in program.__name__ else 3)


def test_a_run_goes_on_until_every_optimizer_has_stepped():
    """An optimizer that steps seldom is waited for, but not for ever."""
    seen = preflight(lambda: adversaries(7, 1000))
    assert seen.steps == 21
    seen = preflight(lambda: adversaries(11, 1000))
    assert seen.steps == 24


class OfAnotherPackage(torch.optim.Optimizer):
    """Its own `step`, and an optimizer inside that does the work: both are one for the run."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(parameters, lr=lr)

    def step(self, closure=None):
        return self.inner.step(closure)


def test_optimizers_of_other_packages():
    seen = preflight(lambda: adversaries(5, 100, optimizer=OfAnotherPackage))
    assert (seen.findings, seen.parameters) == ((), 4)


def test_messages(tmp_path):
    (found,) = run(mean_per_micro_batch, tmp_path, wrong=True).findings
    assert "in step 0 the losses of 4 micro-batches have the weights 0.25, 0.25, 0.25, 0.25" in (
        found.message
    )
    assert "their targets ask for 8/36, 8/36, 8/36, 12/36" in found.message
    (found,) = run(one_tensor_corrupt, tmp_path, wrong=True).findings
    assert found.message == (
        "checkpoint.pt: 1 of 4 tensors read back differ from the model's: 2.weight"
    )


def test_what_is_not_judged_has_a_reason():
    report = preflight(plain)
    assert report.not_judged["micro-batches are parts of one batch"].startswith("one backward")
    assert report.not_judged["checkpoint reads back"].startswith("nothing was saved")
    assert report.not_judged["epochs differ"] == "no DataLoader that shuffles was used"
    assert report.dtypes == {"Linear": {"float32": 6}, "ReLU": {"float32": 3}}
    total = len(report.judged) + len(report.not_judged)
    assert (len(report.judged), total) == (10, 24)
    assert "later steps" not in report.not_judged


def test_a_program_that_ends_early_is_said_to():
    def program():
        model = net()
        loop(model, sgd(model), steps=1)

    report = preflight(program)
    assert report.steps == 1
    assert report.not_judged["later steps"] == "the program ended by itself after 1 of 3 steps"


def test_torch_is_left_as_it_was():
    kept = [F.cross_entropy, torch.save, DataLoader.__iter__, loaders._BaseDataLoaderIter.__next__]
    preflight(plain)
    assert kept == [
        F.cross_entropy,
        torch.save,
        DataLoader.__iter__,
        loaders._BaseDataLoaderIter.__next__,
    ]


# ---- 5. functions ------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Linear(8, 4)

    def forward(self, x):
        return self.weight(x)


def rows_of_lengths():
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(8) < torch.tensor([1, 7, 3, 5, 2, 6, 4, 8])[:, None]
    return {"x": torch.randn(8, 8, 8, generator=generator), "mask": mask}


def token_sum(model, part):
    return (model(part["x"]).square().sum(-1) * part["mask"]).sum()


def test_micro_batch_invariance():
    model, batch = Masked(), rows_of_lengths()
    model.weight.weight.grad = kept = torch.ones(4, 8)

    def right(model, part, parts):
        return token_sum(model, part) / sum(each["mask"].sum() for each in parts)

    def wrong(model, part, parts):
        return token_sum(model, part) / part["mask"].sum() / len(parts)

    assert all(each.is_equal for each in micro_batch_invariance(model, right, batch))
    two, eight = micro_batch_invariance(model, wrong, batch)
    assert (two.micro_batches, two.is_equal, eight.is_equal) == (2, False, False)
    assert two.found == pytest.approx((1 / 2, 1 / 2), rel=1e-4)
    assert two.expected == pytest.approx((16 / 36, 20 / 36), rel=1e-4)
    assert eight.found == pytest.approx((1 / 8,) * 8, rel=1e-3)
    assert eight.expected == pytest.approx([n / 36 for n in (1, 7, 3, 5, 2, 6, 4, 8)], rel=1e-3)
    assert model.weight.weight.grad is kept


def test_a_loss_that_mixes_samples_is_named():
    def mixes(model, part, parts):
        return (model(part["x"]) - model(part["x"]).mean(0)).square().sum()

    (found,) = micro_batch_invariance(Masked(), mixes, rows_of_lengths(), [2])
    assert (found.is_equal, found.expected) == (False, ())
    assert "mixes samples" in str(found)


@pytest.mark.parametrize(
    ("loss", "splits"),
    [
        (lambda m, part, parts: F.dropout(m(part["x"])).sum(), [2]),
        (lambda m, part, parts: m(part["x"]).sum() * 0, [2]),
        (lambda m, part, parts: m(part["x"]).sum(), [9]),
        (lambda m, part, parts: m(part["x"]).sum(), []),
    ],
    ids=["random", "zero", "too many", "none"],
)
def test_what_micro_batch_invariance_refuses(loss, splits):
    with pytest.raises(ArgumentError):
        micro_batch_invariance(Masked(), loss, rows_of_lengths(), splits)


def test_check_checkpoint_refuses_pickles_and_strangers(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(net(), path)  # a whole module is a pickle of code
    with pytest.raises(ArgumentError, match="read back safely"):
        check_checkpoint(net(), path)
    torch.save({"other": torch.ones(1)}, path)
    with pytest.raises(ArgumentError, match="no tensor with a name of the model"):
        check_checkpoint(net(), path)
    torch.save({"state": {f"module.{n}": t for n, t in net().state_dict().items()}}, path)
    assert check_checkpoint(net(), path) == ()


def test_a_finding_of_one_model_is_kept_if_another_cannot_be_judged():
    def program():
        mixed, other = nn.Sequential(nn.Linear(8, 4), Centred(0)), nn.Linear(4, 2)
        parameters = [*mixed.parameters(), *other.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            x = mixed(torch.randn(6, 8))
            other(x[:1]).square().sum().backward()
            optimizer.step()

    report = preflight(program)
    assert {finding.rule for finding in report.findings} == {"eval-depends-on-others"}
    assert "eval output is batch-independent" in report.not_judged
