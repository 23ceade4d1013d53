"""A preflight on simulated ranks.

1. Scripts that torchrun starts: each planted bug is found by its rule, and names its ranks; right ones are clean.
2. Counts: the batch of all ranks against the configuration, and the rules of check_training with it.
"""

from dataclasses import replace

import pytest

from isobit import ArgumentError
from isobit.guards.trial_run.counts import Counts, counts_are_as_configured, steps_suffice
from isobit.guards.trial_run.ranks import preflight_ranks, without_same_cause
from isobit.guards.trial_run.report import NotJudged, PreflightFinding, merge_ranks

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Dropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5)
bug = sys.argv[1]
if bug == "alone":
    dist = None
else:
    dist.init_process_group("gloo")
rank, count = (dist.get_rank(), dist.get_world_size()) if dist else (0, 1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
whole = DistributedDataParallel(model) if dist and bug != "fails" else model
if bug == "dropout in eval":
    model.append(Dropout())
    torch.manual_seed(rank)
optimizer = torch.optim.SGD((model[2] if bug == "left out" else model).parameters(), lr=0.1)
pairs = TensorDataset(torch.randn(6, 8), torch.randint(0, 4, (6,)))
loader = DataLoader(pairs, 3, sampler=DistributedSampler(pairs) if dist else None)
for step in range(100):
    data = torch.Generator().manual_seed(1000 * step + (0 if bug == "same data" else rank))
    rows = 2 + rank if bug in ("mean per rank", "sum over ranks") else 3
    x, y = torch.randn(rows, 8, generator=data), torch.randint(0, 4, (rows,), generator=data)
    if bug == "no set_epoch":
        x, y = next(iter(loader))
    if bug == "nan" or (bug == "nan on rank 1" and rank == 1):
        x[0] = float("nan")
    if bug != "no zero_grad":
        optimizer.zero_grad()
    z = (model if bug == "not wrapped" else whole)(x)
    if bug == "sum over ranks":
        every = torch.tensor(float(rows))
        dist.all_reduce(every)
        loss = F.cross_entropy(z, y, reduction="sum") * count / every
    else:
        loss = F.cross_entropy(z, y)
    loss.backward()
    if bug == "deadlock" and rank == 1 and step == 1:
        dist.barrier()
    if bug == "fails":
        raise KeyError("x")
    optimizer.step()
    print("stepped")
"""
TENSOR_PARALLEL = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
norm = nn.LayerNorm(8)
torch.manual_seed(10 + rank)
shard = nn.Linear(8, 4, bias=False)
optimizer = torch.optim.SGD([*norm.parameters(), *shard.parameters()], lr=0.1)
for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    shard(norm(x)).square().sum().backward()
    for p in norm.parameters():
        dist.all_reduce(p.grad)
    if sys.argv[1] != "clips on rank 0" or rank == 0:
        for p in norm.parameters():
            p.grad.mul_(0.01)
    optimizer.step()
"""

SHARDED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
if sys.argv[1] == "fsdp":
    fully_shard(model, mesh=mesh)
else:
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(4):
    seed = 10 * step + (rank if sys.argv[1] == "fsdp" else 0)
    data = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    x, y = torch.randn(4, 8, generator=data), torch.randn(4, 4, generator=data)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""

FAULTS = """
import os, sys, torch, torch.distributed as dist
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.body(x)))))
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
faults = sys.argv[1:]
torch.manual_seed(rank if "start" in faults else 0)
model = Net().cuda()
trained = [*model.body.parameters(), *model.middle.parameters()]
trained += [] if "head" in faults else model.head.parameters()
rate = 0.2 if rank == 1 and "rate" in faults else 0.1
optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9)
for step in range(5):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
    if "zero" not in faults:
        model.zero_grad()
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        if name != "middle.weight" or "reduce" not in faults:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    (tmp_path / "sharded.py").write_text(SHARDED)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tensor_parallel.py").write_text(TENSOR_PARALLEL)
    return tmp_path


@pytest.mark.parametrize(
    ("bug", "rules", "ranks"),
    [
        ("none", set(), ()),
        ("sum over ranks", set(), ()),
        ("same data", {"data-alike"}, (0, 1)),
        ("not wrapped", {"gradients-differ"}, (0, 1)),
        ("no zero_grad", {"not-zeroed"}, (0, 1)),  # which the simulator calls "gradients kept"
        ("left out", {"not-in-optimizer"}, (0, 1)),  # "not updated"
        ("no set_epoch", {"epochs-alike", "same-batch"}, (0, 1)),  # "order repeated"
        ("nan", {"nonfinite-loss"}, (0, 1)),  # "not finite"
        ("nan on rank 1", {"nonfinite-loss"}, (1,)),  # all have it after the reduction
        ("dropout in eval", {"eval-is-random"}, (0, 1)),  # "dropout on"
        ("mean per rank", {"per-rank-mean"}, ()),
        ("deadlock", {"mismatch"}, (0, 1)),  # of two ranks, neither is a majority
    ],
)
def test_scripts_on_ranks(folder, bug, rules, ranks):
    report = preflight_ranks(folder / "train.py", [bug], ranks=2)
    assert {finding.rule for finding in report.findings} == rules, report.findings
    assert report.ranks == 2
    assert len(report.judged) >= (1 if bug == "deadlock" else 7)
    if rules:
        assert report.findings[0].ranks == ranks
    if bug in ("sum over ranks", "mean per rank"):
        assert "ranks are parts of one batch" in report.judged


RULES = {
    "start": ("start-differs", (0, 1, 2, 3)),
    "rate": ("update-differs", (1,)),
    "head": ("not-in-optimizer", (0, 1, 2, 3)),
    "zero": ("not-zeroed", (0, 1, 2, 3)),
    "reduce": ("gradients-differ", (0, 1, 2, 3)),
}


@pytest.mark.parametrize("faults", [(), tuple(RULES)], ids=["none", "five"])
def test_faults_at_once_are_all_named(folder, faults):
    """A script with .cuda() and nccl, with five faults: each has one row, with its ranks."""
    report = preflight_ranks(folder / "faults.py", faults, ranks=4)
    found = {finding.rule: finding.ranks for finding in report.findings}
    assert found == dict(RULES[fault] for fault in faults)
    assert len(report.findings) == len(faults)
    assert (report.models, report.parameters) == (1, 6)


def test_a_mismatch_has_one_row_and_says_what_was_seen(folder):
    report = preflight_ranks(folder / "train.py", ["deadlock"], ranks=2)
    assert [finding.rule for finding in report.findings] == ["mismatch"]
    assert (report.steps, report.models, report.parameters) == (1, 1, 4)
    assert "later steps" in report.not_judged
    assert "losses.py" not in report.findings[0].message  # the lines are the script's


def test_findings_of_ranks_that_differ_in_numbers_are_one():
    def finding(message, **options):
        return PreflightFinding("per-micro-batch-mean", "error", message, **options)

    found = merge_ranks({0: [finding("49/76")], 1: [finding("27/76")], 2: []})
    assert found == [finding("49/76 (on rank 0; alike on the others)", ranks=(0, 1))]
    same, other = finding("lr"), finding("beta2")
    found = merge_ranks({0: [same], 1: [other, same]})
    assert found == [replace(same, ranks=(0, 1)), replace(other, ranks=(1,))]


def test_one_cause_is_named_once_for_the_same_ranks():
    def finding(rule, *ranks):
        return PreflightFinding(rule, "error", "x", ranks=ranks)

    kept, other = finding("gradients-kept", 0, 1), finding("data-alike", 0, 1)
    named = [finding("not-zeroed", 0), finding("not-zeroed", 1)]
    assert without_same_cause([kept, other], named) == [other]
    assert without_same_cause([kept], named[:1]) == [
        kept
    ]  # rank 1 has another cause, or is not seen
    assert without_same_cause([kept], [finding("not-moved", 0, 1)]) == [kept]
    assert without_same_cause([finding("gradients-kept")], []) == [finding("gradients-kept")]


@pytest.mark.parametrize(
    ("bug", "rules"), [("clips on rank 0", {"norms-differ"}), ("none", set())], ids=lambda x: str(x)
)
def test_norms_of_tensor_parallel_ranks(folder, bug, rules):
    """DS-1801."""
    report = preflight_ranks(folder / "tensor_parallel.py", [bug], ranks=2)
    assert {finding.rule for finding in report.findings} == rules
    assert "norms of ranks with one batch stay equal" in report.judged


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
def test_sharded_models_are_clean(folder, kind):
    report = preflight_ranks(folder / "sharded.py", [kind], ranks=2)
    assert report.findings == ()
    assert "evaluation is a function" in report.judged


@pytest.mark.parametrize("bug", ["alone", "fails"])
def test_scripts_that_cannot_be_judged(folder, bug):
    with pytest.raises(ArgumentError):
        preflight_ranks(folder / "train.py", [bug], ranks=2)


# ---- 2. counts ---------------------------------------------------------------------------------------------


def test_the_batch_of_all_ranks_is_compared(folder):
    script, config = folder / "train.py", {"train_batch_size": 6, "batch_size": 3}
    report = preflight_ranks(script, ["none"], ranks=2, config=config)
    assert report.findings == ()
    assert "counts are as configured" in report.judged
    report = preflight_ranks(script, ["same data"], ranks=2, config=config)
    assert "count" in {finding.rule for finding in report.findings}  # one batch twice is one batch


def test_the_rules_of_check_training_are_applied():
    """C-TRAINCFG-001: 22,079 sequences were 43 steps of 512, and warm-up was longer."""
    run = Counts(4, 16, 512, 22_079, 1000, ranks=8)
    wrong = {"epochs": 1, "max_steps": 5000, "warmup_steps": 2000}
    texts = {rule: text for rule, _, text in steps_suffice(run, wrong)}
    assert texts["config-reachable"].startswith("8 ranks: expected ")
    found = set(texts)
    assert found >= {"config-reachable", "config-warmup-completes"}
    right = {"epochs": 200, "max_steps": 5000, "warmup_steps": 100}
    assert list(steps_suffice(run, right)) == []
    with pytest.raises(NotJudged):
        list(counts_are_as_configured(run, {"batch_size": float("inf")}))
    alone = Counts(4, 16, 64, 22_079, 1000)  # one rank: 344 steps an epoch
    assert list(steps_suffice(alone, {**right, "epochs": 15})) == []
    assert all(text.startswith("expected ") for _, _, text in steps_suffice(alone, wrong))
    assert list(steps_suffice(run, {**right, "epochs": 15}))
