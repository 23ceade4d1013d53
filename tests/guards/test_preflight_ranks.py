"""A preflight on simulated ranks, of declarations and of configurations.

1. Scripts that torchrun starts: each planted bug is found by its rule, and names its ranks; the right one is clean.
2. Counts: the batch of all ranks against the configuration, and the rules of check_training with it.
3. Declarations: each key has a wrong and a right program; unknown keys and wrong kinds are refused.
4. Configurations: YAML, JSON, TOML; a pickle, an alias bomb and broken files are refused.
5. The page escapes what it shows and says what was not checked.
"""

import json
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isobit import ArgumentError
from isobit.cli.config_file import read_config
from isobit.cli.preflight_ranks import preflight_ranks
from isobit.guards import preflight
from isobit.guards.trial_run.counts import Counts, counts_are_as_configured
from isobit.report.preflight_page import write_preflight_page
from tests.guards.preflight_programs import adam_with_warm_up_and_groups, loop, plain, sgd

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
bug = sys.argv[1]
if bug == "alone":
    dist = None
else:
    dist.init_process_group("gloo")
rank, count = (dist.get_rank(), dist.get_world_size()) if dist else (0, 1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
whole = DistributedDataParallel(model) if dist and bug != "fails" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    data = torch.Generator().manual_seed(1000 * step + (0 if bug == "same data" else rank))
    rows = 2 + rank if bug in ("mean per rank", "sum over ranks") else 3
    x, y = torch.randn(rows, 8, generator=data), torch.randint(0, 4, (rows,), generator=data)
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


@pytest.fixture
def folder(tmp_path):
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
        ("no zero_grad", {"not-zeroed"}, (0, 1)),
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
    wrong = {"num_train_epochs": 1, "max_steps": 5000, "warmup_steps": 2000}
    found = {rule for rule, _, _ in counts_are_as_configured(run, wrong)}
    assert found >= {"config-reachable", "config-warmup-completes"}
    right = {"num_train_epochs": 200, "max_steps": 5000, "warmup_steps": 100}
    assert list(counts_are_as_configured(run, right)) == []
    alone = Counts(4, 16, 64, 22_079, 1000)  # one rank: 344 steps an epoch
    assert list(counts_are_as_configured(alone, {**right, "num_train_epochs": 15})) == []
    assert list(counts_are_as_configured(run, {**right, "num_train_epochs": 15}))


# ---- 3. declarations ---------------------------------------------------------------------------------------


def tied(wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    if not wrong:
        model[1].weight = model[0].weight
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def partly_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    loop(model, sgd(model))


@pytest.mark.parametrize(
    ("program", "declared", "rules"),
    [
        (partly_frozen, {"frozen": ["0.*"]}, set()),
        (plain, {"frozen": ["0.*"]}, {"not-frozen"}),  # mmpretrain-702
        (partly_frozen, {"frozen": ["encoder.*"]}, {"not-frozen"}),
        (lambda: tied(False), {"tied": [["0.weight", "1.weight"]]}, set()),
        (lambda: tied(True), {"tied": [["0.weight", "1.weight"]]}, {"not-tied"}),
        (lambda: tied(False), {"tied": [["0.weight", "2.weight"]]}, {"not-tied"}),
        (plain, {"hyperparameters": {"lr": 0.01}}, set()),
        (plain, {"hyperparameters": {"lr": 0.1}}, {"hyperparameter"}),
        (plain, {"global_batch_size": 4}, set()),
        (plain, {"global_batch_size": 8}, {"count"}),
    ],
)
def test_declarations(program, declared, rules):
    report = preflight(program, declare=declared)
    assert {finding.rule for finding in report.findings} == rules


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"froze": []},
        {"frozen": "0.*"},
        {"frozen": [1]},
        {"tied": [["a"]]},
        {"tied": "a"},
        {"hyperparameters": {"rate": 1}},
        {"hyperparameters": {"lr": "fast"}},
        {"hyperparameters": [1]},
        {"global_batch_size": 0},
        {"global_batch_size": True},
    ],
    ids=str,
)
def test_declarations_that_are_refused(declared):
    with pytest.raises(ArgumentError, match="declaration"):
        preflight(plain, declare=declared)


# ---- 4. configurations -------------------------------------------------------------------------------------


def test_configurations_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-2\n2: [1, null]\nwhen: 2026-01-01\n")
    assert read_config(tmp_path / "a.yaml") == {
        "lr": "1e-2",
        "2": [1, None],
        "when": "2026-01-01",
    }
    (tmp_path / "a.json").write_text('{"bf16": {"enabled": true}}')
    assert read_config(tmp_path / "a.json") == {"bf16": {"enabled": True}}
    (tmp_path / "a.toml").write_text("[optimizer]\nlr = 3e-4\n")
    if sys.version_info >= (3, 11):
        assert read_config(tmp_path / "a.toml") == {"optimizer": {"lr": 3e-4}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training_args.bin", "x"),
        ("a.yaml", "- 1"),
        ("a.yaml", "a: [1"),
        ("a.yaml", "!!python/object/apply:os.getcwd []"),
        (
            "a.yaml",
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{c}: &{c} [{','.join('*' + p for _ in range(10))}]\n"
                for p, c in zip("abcdef", "bcdefg", strict=True)
            ).replace("*p", "*a"),
        ),
        ("a.toml", "lr ="),
    ],
    ids=["pickle", "list", "broken", "code", "aliases", "toml"],
)
def test_configurations_that_are_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError):
        read_config(tmp_path / name)


def test_a_warm_up_must_have_begun():
    config = {"lr": 0.01, "warmup_steps": 100}
    (found,) = preflight(plain, config=config).findings
    assert found.rule == "no-warm-up"
    assert "step 0 is 0.01 already" in found.message
    config = {"lr": 0.01, "betas": [0.9, 0.95], "warmup_steps": 2}
    assert preflight(adam_with_warm_up_and_groups, config=config).is_clean


def test_bf16_of_a_configuration_must_have_run():
    found = preflight(plain, config={"bf16": True}).findings
    assert [finding.rule for finding in found] == ["autocast-without-effect"]
    assert preflight(plain, config={"bf16": False, "fp16": {"enabled": "auto"}}).is_clean


# ---- 5. the page -------------------------------------------------------------------------------------------


def test_the_page():
    report = {
        "findings": [
            {
                "rule": "not-tied",
                "severity": "error",
                "step": 1,
                "ranks": [0],
                "module": "<b>",
                "message": "a & b",
            }
        ],
        "judged": ["one"],
        "not_judged": {"two": "because <i>"},
        "dtypes": {"Linear": {"float32": 2}},
        "ranks": 2,
        "steps": 3,
        "parameters": 4,
    }
    page = write_preflight_page("<script>.py", json.loads(json.dumps(report)))
    assert "1 finding; 1 of 2 checks made, on 2 ranks, 3 steps and 4 parameters" in page
    assert "&lt;b&gt;: a &amp; b" in page
    assert "not made: because &lt;i&gt;" in page
    assert "<script>.py" not in page
    clean = write_preflight_page("a.py", {**report, "findings": []})
    assert "<p>Nothing.</p>" in clean
