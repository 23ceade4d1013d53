"""C-TRAINCFG-001: every training configuration is judged before it costs anything.

1. The seed's configuration is rejected without a script, by the names of several trainers; its twin is accepted.
2. The same within a script, with one, two and three optimizers, and with the program's own schedule.
3. Counts that are not known are named, with exit code 2; hostile and wrong files too.
4. C-HYPERPARAMS-001: every optimizer has what the configuration says, and defaults that nobody names are noted.
"""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isobit import ArgumentError
from isobit.cli.main import main
from isobit.guards import preflight
from isobit.guards.configured_steps import judge_plan, plan_of, rate_at, read_counts
from isobit.guards.trial_run.hyperparameters import rates_of

STEPS = "configured steps suffice"
ALBOR = {
    "training": {
        "epochs": 1,
        "max_steps": 5000,
        "batch_size": 4,
        "grad_accum": 128,
        "seq_len": 1024,
    },
    "optimizer": {"lr": 3e-4, "beta2": 0.95},
    "scheduler": {"type": "cosine", "warmup_steps": 2000},
}
TRANSFORMERS = {
    "num_train_epochs": 1,
    "max_steps": 5000,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 128,
    "learning_rate": "3e-4",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2000,
    "eval_steps": 7,
}
TORCHTITAN = {
    "training": {"steps": 1500, "local_batch_size": 4, "seq_len": 1024},
    "lr_scheduler": {"warmup_steps": 2000, "decay_type": "linear"},
    "validation": {"steps": 10_000, "local_batch_size": 1},
}
DEEPSPEED = {
    "train_batch_size": 512,
    "epochs": 1,
    "scheduler": {"params": {"warmup_num_steps": 2000, "total_num_steps": 5000}},
}
FOUND = {"reachable", "warmup-completes", "warmup-short", "peak-reached"}


def rules_of(config, **given):
    return {finding.rule for finding in judge_plan(plan_of(config, given, is_strict=True)).findings}


# ---- 1. without a script -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        (ALBOR, FOUND),
        (TRANSFORMERS, FOUND),
        (DEEPSPEED, FOUND),
        (TORCHTITAN, {"warmup-completes", "warmup-short", "peak-reached"}),  # reads its data again
        (
            {**ALBOR, "scheduler": {"warmup_ratio": 0.4}},
            FOUND,
        ),  # of 5000 steps, of which 43 are taken
        ({**TRANSFORMERS, "warmup_steps": 0.4}, FOUND),  # as transformers 5 writes a ratio
    ],
)
def test_the_configuration_of_the_seed_is_rejected(config, rules):
    """FALSIFY-CFG-001 and 002."""
    assert rules_of(config, sequences=22_079) == rules
    judgement = judge_plan(plan_of(config, {"sequences": 22_079}))
    assert judgement.steps == (1500 if config is TORCHTITAN else 43)


def test_the_rate_of_the_seed_is_named():
    found = judge_plan(plan_of(ALBOR, {"sequences": 22_079})).findings
    (peak,) = (each for each in found if each.rule == "peak-reached")
    assert "the learning rate ends at 6.3e-06, and its peak is 0.0003" in peak.received


RIGHT = [
    {
        **ALBOR,
        "training": {**ALBOR["training"], "epochs": 117},
        "scheduler": {"warmup_ratio": 0.08},
    },
    {**TRANSFORMERS, "num_train_epochs": 117, "warmup_steps": 500},
    {
        **TRANSFORMERS,
        "num_train_epochs": 3.0,
        "warmup_steps": 500,
    },  # a default, which max_steps overrides
    {"epochs": 200, "batch_size": 4, "accumulation": 128, "warmup_ratio": 0.1},
    {"epochs": 0.5, "batch_size": 4, "warmup_steps": 10},
    {"training": {"steps": 10_000, "local_batch_size": 8}, "lr_scheduler": {"warmup_steps": 200}},
    {**TRANSFORMERS, "max_steps": -1, "num_train_epochs": 200, "warmup_steps": 500},
]


@pytest.mark.parametrize("config", RIGHT, ids=range(len(RIGHT)))
def test_right_configurations(config):
    assert rules_of(config, sequences=22_079) == set()


def test_tokens():
    config = {**ALBOR, "training": {**ALBOR["training"], "epochs": 117}, "scheduler": {}}
    known = {"parameters": 370_000_000, "sequences": 22_079}
    assert rules_of(config, **known) == {"tokens"}
    assert rules_of(config, **{**known, "parameters": 200_000_000}) == set()
    # 22,079 sequences of 1024, given as tokens
    assert rules_of(ALBOR, tokens=22_079 * 1024) == FOUND


def test_ranks_share_a_step():
    config = {"epochs": 1, "max_steps": 100, "batch_size": 4}
    assert rules_of(config, sequences=400) == set()
    assert rules_of(config, sequences=400, ranks=2) == {"reachable"}
    assert rules_of({**config, "global_batch_size": 8}, sequences=400) == {"reachable"}


def test_schedules_are_those_of_transformers():
    schedules = pytest.importorskip("transformers.optimization")
    parameter = nn.Parameter(torch.zeros(1))
    kinds = ("linear", "cosine", "constant_with_warmup", "constant", "inverse_sqrt")
    for kind in kinds:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        options = {} if kind == "constant" else {"num_warmup_steps": 7}
        if kind in ("linear", "cosine"):
            options["num_training_steps"] = 40
        made = schedules.get_scheduler(kind, optimizer, **options)
        for step in range(40):
            assert made.get_last_lr()[0] == pytest.approx(rate_at(kind, step, 7, 40)), (kind, step)
            optimizer.step()
            made.step()


def run(capsys, *words):
    code = main(["preflight", *map(str, words)])
    return code, capsys.readouterr()


def test_the_command(tmp_path, capsys):
    config = tmp_path / "pretrain-350m.json"
    config.write_text(json.dumps(ALBOR))
    code, told = run(capsys, config, "--sequences", 22_079, "--parameters", 370_000_000, "--json")
    record = json.loads(told.out)
    assert code == 1
    assert {f["rule"].removeprefix("config-") for f in record["findings"]} == {*FOUND, "tokens"}
    assert record["run_steps"] == 43
    code, told = run(capsys, config, "--sequences", 22_079, "--html", tmp_path / "page.html")
    assert (code, "the run takes 43 steps; not judged: tokens" in told.out) == (1, True)
    assert "config-reachable" in (tmp_path / "page.html").read_text()
    config.write_text(json.dumps(RIGHT[0]))
    code, told = run(capsys, config, "--sequences", 22_079)
    assert (code, "clean" in told.out) == (0, False)  # the rule of tokens was not judged
    assert run(capsys, config, "--config", config)[0] == 2


def test_the_command_loads_no_torch(tmp_path):
    (tmp_path / "a.yaml").write_text("epochs: 1\nbatch_size: 4\nsequences: 100\n")
    program = (
        "import sys; from isobit.cli.main import main; code = main(['preflight', 'a.yaml']);"
        "sys.exit(3 if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 0


# ---- 2. within a script ------------------------------------------------------------------------------------


def trained_by(optimizers, *, schedule=None, parts=False):
    """Train a model of three parts with as many optimizers: 88 sequences, batches of 4, accumulation of 4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    groups = [[*part.parameters()] for part in model]
    if optimizers == 1:
        groups = [[*model.parameters()]]
    elif optimizers == 2:
        groups = [groups[0] + groups[1], groups[2]]
    made = [torch.optim.AdamW(group, lr=3e-4, betas=(0.9, 0.95)) for group in groups]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in made[:1] if schedule]
    loader = DataLoader(TensorDataset(torch.randn(88, 8), torch.randn(88, 1)), 4, shuffle=True)
    for _ in range(8):
        for at, (x, y) in enumerate(loader):
            out = model[2](model[1](model[0](x))) if parts else model(x)
            (F.mse_loss(out, y) / 4).backward()
            if at % 4 == 3:
                for optimizer in made:
                    optimizer.step()
                    optimizer.zero_grad()
                for each in schedules:
                    each.step()


SMALL = {
    "training": {"epochs": 1, "max_steps": 5000, "batch_size": 4, "grad_accum": 4},
    "optimizer": {"lr": 3e-4, "beta2": 0.95},
}


@pytest.mark.parametrize(("optimizers", "parts"), [(1, False), (2, False), (3, False), (3, True)])
def test_with_any_number_of_optimizers(optimizers, parts):
    def program():
        trained_by(optimizers, parts=parts, schedule=lambda step: (step + 1) / 2000)

    config = {**SMALL, "scheduler": {"warmup_steps": 2000}}
    report = preflight(program, config=config)
    assert STEPS in report.judged
    assert {f.rule.removeprefix("config-") for f in report.findings} == FOUND
    assert "received 1 × 5 = 5 steps" in str(report.findings)
    right = {"training": {**SMALL["training"], "epochs": 8, "max_steps": 40}}
    assert preflight(program, config=right).findings == ()


def test_the_schedule_of_the_program_is_evaluated():
    """The configuration is sound; the program's warm-up is longer than it says."""
    config = {"epochs": 8, "batch_size": 4, "accumulation": 4, "lr": 3e-4, "warmup_steps": 2}
    long = preflight(lambda: trained_by(1, schedule=lambda s: min(1.0, s / 400)), config=config)
    (found,) = long.findings
    assert found.rule == "config-peak-reached"
    assert "LambdaLR reaches at most 2.92e-05 in the 40 steps" in found.message
    right = preflight(lambda: trained_by(1, schedule=lambda s: min(1.0, s / 2)), config=config)
    assert right.findings == ()


def test_schedules_that_are_made_of_others_are_run_ahead():
    def made_by(make):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return make(optimizer)

    schedules = torch.optim.lr_scheduler
    for made in (
        made_by(lambda o: schedules.OneCycleLR(o, 2.0, total_steps=10)),
        made_by(
            lambda o: schedules.SequentialLR(
                o,
                [schedules.LinearLR(o, 0.25, total_iters=3), schedules.CosineAnnealingLR(o, 5)],
                [3],
            )
        ),
        made_by(lambda o: schedules.CosineAnnealingWarmRestarts(o, 4)),
    ):
        made.optimizer.step()
        made.step()
        before, ahead, wanted = made.get_last_lr()[0], rates_of(made, 6), []
        assert made.get_last_lr()[0] == before  # the schedule itself is left alone
        for _ in range(6):
            made.optimizer.step()
            made.step()
            wanted.append(made.get_last_lr()[0])
        assert ahead == pytest.approx(wanted)


def test_data_without_a_length_is_not_judged(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.randn(1000, 8))

    def program():
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in DataLoader(Stream(), 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    config = {"epochs": 1, "max_steps": 5000, "batch_size": 4}
    report = preflight(program, config=config)
    assert report.not_judged[STEPS] == (
        "steps-per-epoch: needs the sequences; give --sequences, or epochs and a batch size"
    )
    report = preflight(program, config={**config, "sequences": 1000})
    assert [finding.rule for finding in report.findings] == ["config-reachable"]


# ---- 3. what cannot be judged ------------------------------------------------------------------------------

BOMB = "a: &a [1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join(10 * ['*' + old])}]\n" for old, new in itertools.pairwise("abcdefg")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: 1\nmax_steps: 500\nbatch_size: 4\n", "reachable needs the sequences"),
        ("epochs: 1\nsequences: 100\n", "needs the sequences, the batch size"),
        ("lr: 1e-4\n", "known: nothing"),
        ("epochs: many\n", "'many'"),
        ("epochs: .inf\n", "inf"),
        ("epochs: -4\nbatch_size: [4]\n", "[4]"),
        ("max_steps: 1e300\n", "1e300"),
        ("max_steps: 123456789012345678901234567890\n", "from 1 to 2^63"),
        ("max_steps: true\n", "True"),
        ("pre: {max_steps: 5}\nsft: {max_steps: 6}\n", "pre.max_steps = 5, sft.max_steps = 6"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        (BOMB, "more than 100,000 values"),
        ("[" * 5000, "RecursionError"),
        ("- 1\n", "list"),
        ("", "NoneType"),
        ("a: \x00", "unacceptable character"),
    ],
    ids=lambda text: text[:24].strip(),
)
def test_configurations_that_cannot_be_judged(tmp_path, capsys, text, words):
    (tmp_path / "a.yaml").write_text(text)
    code, told = run(capsys, tmp_path / "a.yaml")
    assert code == 2
    assert told.out == ""
    assert words in told.err or words == "RecursionError"


def test_a_count_that_is_not_positive_is_broken(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("epochs: 0\nbatch_size: 4\nsequences: 100\nmax_steps: 5\n")
    code, told = run(capsys, tmp_path / "a.yaml", "--json")
    assert code == 1
    assert [f["rule"] for f in json.loads(told.out)["findings"]] == ["config-positive"]


def test_the_outermost_value_counts():
    assert read_counts({"max_steps": 5, "inner": {"max_steps": 6}}) == {"max_steps": 5}
    assert read_counts({"eval": {"batch_size": 1}, "logging": {"max_steps": 2}}) == {}
    with pytest.raises(ArgumentError):
        read_counts({"a": {"epochs": 1}, "b": {"epochs": 2}}, is_strict=True)
    assert read_counts({"a": {"epochs": 1}, "b": {"epochs": 2}}) == {"epochs": 1}


@pytest.mark.full
def test_a_script_whose_configured_steps_cannot_be_judged_exits_2(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 8)).square().mean().backward()\n    optimizer.step()\n"
    )
    (tmp_path / "train.yaml").write_text("lr: 0.1\nepochs: 1\nmax_steps: 500\n")
    words = [sys.executable, "-m", "isobit", "preflight", "train.py", "--config", "train.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "could not be judged: steps-per-epoch" in done.stderr) == (2, True)
    more = subprocess.run(
        [*words, "--sequences", "40"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (more.returncode, "config-reachable" in more.stdout) == (1, True)


# ---- 4. hyperparameters ------------------------------------------------------------------------------------


def two_of(first, second):
    def program():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        made = [
            torch.optim.AdamW(part.parameters(), **options)
            for part, options in zip(model, (first, second), strict=True)
        ]
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            for optimizer in made:
                optimizer.step()

    return program


def test_every_optimizer_has_what_is_configured():
    """FALSIFY-HYPERPARAMS-001 with a second optimizer, whose value is no default."""
    base = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    config = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    (found,) = preflight(two_of(base, {**base, "betas": (0.9, 0.99)}), config=config).findings
    assert (
        found.message
        == "beta2 is 0.95 in the configuration and 0.99 in 1 of 1 parameter groups of AdamW"
    )
    own = {"embedding": {"betas": [0.9, 0.99]}}  # a section of its own names it
    program = two_of(base, {**base, "betas": (0.9, 0.99)})
    assert preflight(program, config={**config, **own}).findings == ()
    assert preflight(two_of(base, {**base, "lr": 5e-3}), config=config).findings == ()
    (found,) = preflight(two_of(base, {**base, "weight_decay": 0.01}), config=config).findings
    assert "'s default)" in found.message


def test_defaults_that_nobody_names_are_noted():
    """NEVER: AdamW::default_params(lr)."""
    program = two_of(
        {"lr": 1e-4}, {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0}
    )
    report = preflight(program, config={"lr": 1e-4, "beta2": 0.95})
    assert [finding.rule for finding in report.findings] == ["hyperparameter"]
    assert [note.message for note in report.notes] == [
        "AdamW 0 has its class's default, which no configuration names, in eps 1e-08, weight_decay 0.01, beta1 0.9",
        "AdamW 1 has its class's default, which no configuration names, in beta1 0.9",
    ]
    assert {note.severity for note in report.notes} == {"info"}
    named = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    assert preflight(two_of({"lr": 1e-4}, {"lr": 1e-4}), config=named).notes == ()
