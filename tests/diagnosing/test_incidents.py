"""Theorem: from what a run left, `diagnose` names the granularity, the extent and whether a check before the run finds
the cause, for each incident; and it is silent on the right twin of each."""

import json

import pytest
import torch
from torch import nn

from isobit.cli.main import main
from isobit.diagnosing.diagnosis import diagnose
from isobit.diagnosing.run_folder import look_into
from isobit.guards import Intervals, sinks, watch
from tests.profiling.synthetic import Chrome


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.inner(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(folder, wrong, steps=12, **options):
    """Train a small model under `watch`; `wrong` changes it, its optimizer or its steps."""
    torch.manual_seed(0)
    model = Model()
    rates = {"lr": 1e-3, "betas": (0.9, 0.95)}
    if "rates" in wrong:
        rates |= wrong["rates"]
    trained = list(model.parameters())
    if "left out" in wrong:
        trained = [p for n, p in model.named_parameters() if not n.startswith(wrong["left out"])]
    optimizer = torch.optim.AdamW(trained, **rates)
    if "model" in wrong:
        wrong["model"](model)
    if "optimizer" in wrong:
        wrong["optimizer"](model, optimizer)
    sink = sinks.JsonLines(folder / "events.jsonl")
    every = Intervals(weights=1, gradients=1)
    with watch(model, optimizer, sinks=[sink], intervals=every, **options) as guard:
        for step in range(steps):
            ids = torch.randint(32, (8, 12))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            if "loss" in wrong:
                loss = wrong["loss"](loss, step)
            guard.observe(loss)
            loss.backward()
            if "step" in wrong:
                wrong["step"](model, step)
            optimizer.step()


def nan_in_a_block(model, step):
    if step == 2:
        model.blocks[2].inner.weight.grad[3] = float("nan")


def huge_state(model, optimizer):
    for parameter in model.blocks[1].parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.full_like(parameter, 1e6)


def cut_off(model):
    first = model.blocks[0]
    first.inner.weight.requires_grad_(True)
    forward = first.inner.forward
    first.inner.forward = lambda x: forward(x.detach()).detach()


def slow_loader(folder, is_wrong):
    chrome = Chrome()
    for number, at in ((1, 0), (2, 1000)):
        chrome.step(number, at, at + 1000)
        if is_wrong:
            chrome.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + 500)
        begin = at + 500 if is_wrong else at + 5
        chrome.kernel("sgemm", begin, at + 995, launched=begin - 1)
    chrome.write(folder / "trace.json")


def stale_read(folder, is_wrong):
    chrome = Chrome()
    chrome.step(1, 0, 1000)
    chrome.kernel("gradient", 10, 900, launched=5)
    if not is_wrong:
        chrome.call("cudaStreamSynchronize", 50, 900)
    at = 500 if is_wrong else 910
    chrome.copy("DtoH (Device -> Pinned)", at, at + 80, 4096, launched=at - 5, stream=9)
    chrome.write(folder / "trace.json")


def pageable(folder, is_wrong):
    chrome = Chrome()
    chrome.step(1, 0, 1000)
    kind = "Pageable" if is_wrong else "Pinned"
    chrome.copy(f"HtoD ({kind} -> Device)", 5, 105, 1000, launched=4)
    chrome.kernel("sgemm", 105, 995, launched=6)
    chrome.write(folder / "trace.json")


def hang(folder, is_wrong):
    from isobit.errors import DeadlockError
    from isobit.simulator import World

    def program(rank):
        import torch.distributed as dist

        if not (is_wrong and rank == 1):
            dist.all_reduce(torch.ones(2))

    try:
        World(2, seed=1, flight_recorder=folder).run(program)
    except DeadlockError:
        assert is_wrong


def configured(folder, is_wrong):
    steps = 5000 if is_wrong else 43
    text = f"epochs: 1\nmax_steps: {steps}\nwarmup_steps: {2000 if is_wrong else 4}\nsequences: 22079\n"
    (folder / "train.yaml").write_text(text + "batch_size: 4\ngradient_accumulation_steps: 128\n")


def of_training(wrong, right=None, **options):
    return lambda folder, is_wrong: train(folder, wrong if is_wrong else right or {}, **options)


CONFIG = {"optimizer": {"lr": 1e-3, "beta2": 0.95}}
# incident -> (what happens, granularity, extent, when, the rule of the cause)
INCIDENTS = {
    "NaN at step 2 in one block": (
        of_training({"step": nan_in_a_block}), "block", "local", "dynamic", "nonfinite-gradient"),
    "ALB-044: gradients of 1e35, not clipped": (
        of_training({"loss": lambda loss, step: loss * 1e30}, max_norm=100.0),
        "loop", "global", "dynamic", "norm-above-limit"),
    "ALB-044: beta2 of 0.999 where the file says 0.95": (
        of_training({"rates": {"betas": (0.9, 0.999)}}, config=CONFIG),
        "loop", "global", "static", "hyperparameter"),
    "ALB-059: state of the optimizer that is not zero": (
        of_training({"optimizer": huge_state}), "block", "local", "static", "state-not-zero"),
    "GRADFLOW: a weight without gradient": (
        of_training({"model": cut_off}), "block", "local", "static", "no-gradient"),
    "parameters that no optimizer has": (
        of_training({"left out": "blocks.3"}), "loop", "local", "static", "not-in-optimizer"),
    "trained in evaluation mode": (
        of_training({"model": lambda model: model.eval()}), "loop", "global", "static", "eval-mode"),
    "TRAINCFG: 5,000 steps of 43": (configured, "loop", "global", "static", "config-"),
    "ALB-065: a copy that nothing orders": (
        stale_read, "transfer", "local", "dynamic", "unordered-copy"),
    "C-GPUTRAIN-002: copies of pageable memory": (
        pageable, "transfer", "global", "dynamic", "pageable-copies"),
    "a slow data loader": (slow_loader, "loop", "global", "dynamic", "data-loader"),
    "a hang": (hang, "rank", "local", "dynamic", "hang"),
}  # fmt: skip


@pytest.mark.parametrize("name", INCIDENTS)
@pytest.mark.sweep(6)
def test_an_incident_and_its_right_twin(name, tmp_path):
    happen, granularity, extent, when, rule = INCIDENTS[name]
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.mkdir()
    right.mkdir()
    happen(wrong, True)
    found = diagnosed(wrong)
    assert found.cause is not None
    assert found.cause.rule.startswith(rule), found.evidence
    assert (found.granularity, found.extent, found.when) == (granularity, extent, when)
    assert found.next.startswith("isobit ")
    assert main(["diagnose", str(wrong)]) == 1
    happen(right, False)
    silent = diagnosed(right)
    assert silent.judged, silent
    assert silent.evidence == ()
    assert main(["diagnose", str(right)]) == 0


def diagnosed(folder):
    from isobit.guards.config_file import read_config

    files = look_into(folder)
    return diagnose(files, {path: read_config(path) for path in files.configurations})


def test_five_whys_lead_from_the_symptom_to_the_cause(tmp_path, capsys):
    # The seed's chain: NaN, because gradients explode, because the optimizer is not the configured one.
    def explode(loss, step):
        return loss * (1e38 if step > 3 else 1e5)

    train(
        tmp_path,
        {"loss": explode, "rates": {"betas": (0.9, 0.999)}},
        max_norm=100.0,
        config=CONFIG,
    )
    found = diagnosed(tmp_path)
    rules = [one.rule for one in found.whys]
    assert rules[-1] == "hyperparameter"
    assert rules.index("norm-above-limit") > 0
    assert rules[0] == "nonfinite"
    assert main(["diagnose", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "C-HYPERPARAMS-001" in said
    assert said.index("symptom") < said.index("cause:")


def test_what_cannot_be_read_is_said(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["diagnose", str(tmp_path)]) == 2
    (tmp_path / "trace.json").write_text('{"traceEvents": [{')
    assert main(["diagnose", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "not read" in said.out
    (tmp_path / "trace.json").unlink()
    (tmp_path / "config.json").write_text('{"epochs": 1e400, "max_steps": -1, "batch_size": "x"}')
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "nothing could be judged" in capsys.readouterr().out
    (tmp_path / "deep.jsonl").write_text('{"kind": "finding", "name": "a"}\n' + "[" * 10_000 + "\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert main(["diagnose", str(tmp_path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["diagnosis"]["cause"]["rule"] == "a"


# ---- samples of blocks: mathematics or magnitudes ----------------------------------------------------------------


def scaled(model):
    inner = model.blocks[2].inner
    forward = inner.forward
    inner.forward = lambda x: forward(x) * 1000  # what tanh hides, so the branch is scaled after it
    block = model.blocks[2]
    block.forward = lambda x: x + 100 * torch.tanh(inner(block.norm(x)))


def not_a_number(model):
    block = model.blocks[1]
    whole = block.forward
    block.forward = lambda x: torch.where(torch.arange(16) == 3, (whole(x) - 1e9).sqrt(), whole(x))


def no_gradient(model):
    block = model.blocks[1]
    whole = block.forward
    block.forward = lambda x: whole(x) * 0 + x.detach() + 0 * x


def every_block(model):
    for block in model.blocks:
        block.forward = lambda x, block=block: 8 * (x + torch.tanh(block.inner(block.norm(x))))


SAMPLED = {
    "wrong scale": (scaled, "block-scale", "blocks.2", "local", "the magnitudes of blocks.2 are wrong"),
    "NaN": (not_a_number, "block-nonfinite", "blocks.1", "local", "the mathematics of blocks.1 are wrong"),
    "zero gradient": (
        no_gradient, "block-zero-gradient", "blocks.1", "local", "the mathematics of blocks.1 are wrong"),
    "all grow": (every_block, "blocks-grow", "", "global", "magnitudes are wrong everywhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_tell_wrong_mathematics_from_wrong_magnitudes(name, tmp_path):
    change, rule, block, extent, words = SAMPLED[name]
    train(tmp_path, {"model": change}, blocks=True)
    found = diagnosed(tmp_path)
    assert (found.cause.rule, found.cause.place) == (rule, block), found.evidence
    assert words in found.cause.message
    assert (found.granularity, found.extent) == ("block", extent)


def test_samples_of_a_right_run_are_silent(tmp_path):
    train(tmp_path, {}, steps=45, blocks=True)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "finding"] == []
    sampled = {line["step"] for line in lines if line["name"] == "output.grad.max"}
    assert sampled == {0, 1, 20, 40}
    for name in (
        "output.rms",
        "output.max",
        "output.finite",
        "output.grad.rms",
        "output.grad.finite",
    ):
        modules = {line["module"] for line in lines if line["name"] == name and line["step"] == 20}
        assert modules == {"embedding", *(f"blocks.{at}" for at in range(4)), "head"}
    assert diagnosed(tmp_path).evidence == ()


# ---- what has no step: hangs and errors of Python ----------------------------------------------------------------


def test_a_hang_is_listed_after_a_nan_that_may_have_stopped_a_rank(tmp_path, capsys):
    train(tmp_path, {"step": nan_in_a_block})
    hang(tmp_path, True)
    found = diagnosed(tmp_path)
    assert found.cause.rule == "nonfinite-gradient"
    assert found.whys[0].rule == "hang"
    assert "may follow from nonfinite-gradient" in found.whys[0].message
    assert "the order is not known" in found.whys[0].message
    assert found.whys[0].place == "rank 1"
    stale_read(tmp_path, True)
    assert diagnosed(tmp_path).cause.rule == "unordered-copy"


def test_a_hang_is_the_cause_of_time_that_is_lost(tmp_path):
    hang(tmp_path, True)
    slow_loader(tmp_path, True)
    rows = [{"step": step, "loss": 2.0 + step % 3 + 90 * (step == 300)} for step in range(400)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = diagnosed(tmp_path)
    assert found.cause.rule == "hang"
    assert "order" not in found.cause.message
    assert {"spike-loss", "data-loader"} <= {one.rule for one in found.evidence}


OUT_OF_MEMORY = """loading
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 9, in main
[rank2]:     loss.backward()
[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[rank0]: Traceback (most recent call last):
[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0
"""


@pytest.mark.parametrize("name", ["stderr.log", "stderr", "out.txt", "job.err", "job.out"])
def test_an_error_of_python_is_found(name, tmp_path, capsys):
    (tmp_path / name).write_text(OUT_OF_MEMORY)
    assert main(["diagnose", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "read 1 text with an error" in said
    found = diagnosed(tmp_path)
    assert (found.cause.rule, found.cause.place) == ("traceback", "rank 2")
    assert found.cause.message.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert [one.place for one in found.evidence] == ["rank 2", "rank 0"]
    assert (found.granularity, found.extent) == ("rank", "local")
    hang(tmp_path, True)
    found = diagnosed(tmp_path)
    assert [one.rule for one in found.evidence] == ["traceback", "hang", "traceback"]


def test_texts_are_read_in_part_and_are_plain(tmp_path, monkeypatch, capsys):
    from isobit.diagnosing import diagnosis

    text = "started\n" * 10
    path = tmp_path / "stderr.log"
    path.write_text(text)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "nothing could be judged" in capsys.readouterr().out
    hostile = "ValueError: \x1b[31mred\x07 \u202e" + "x" * 10_000
    path.write_text(text + f"{hostile}\n" + "ValueError: more\n" * 100)
    assert main(["diagnose", str(tmp_path)]) == 1
    assert not set("\x1b\x07\u202e") & set(capsys.readouterr().out)
    messages = [one.message for one in diagnosed(tmp_path).evidence]
    assert len(messages) == 2
    assert messages[0].startswith("ValueError: red xxx")
    assert max(map(len, messages)) <= 300
    monkeypatch.setattr(diagnosis, "END_OF_TEXT", 40)
    path.write_text(
        "x\n" * 1000 + "ValueError: in the middle\n" + "x\n" * 1000 + "KeyError: last\n"
    )
    assert [one.message for one in diagnosed(tmp_path).evidence] == ["KeyError: last"]
    path.write_text("Traceback (most recent call last):\n  File")
    assert [one.rule for one in diagnosed(tmp_path).evidence] == ["traceback"]


def test_printed_losses_are_judged(tmp_path):
    lines = [f"{{'loss': {'nan' if at == 70 else 2.0}, 'epoch': 0.1}}\n" for at in range(100)]
    (tmp_path / "stdout.log").write_text("".join(lines))
    assert [(one.rule, one.step) for one in diagnosed(tmp_path).evidence] == [("nonfinite", 70)]


# ---- configurations, commands and words --------------------------------------------------------------------------


def test_a_log_is_held_against_the_configuration_of_its_folder(tmp_path, capsys):
    rows = [{"step": step, "loss": 2.0, "lr": 8e-4} for step in range(50)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "no configuration of the run has one" in capsys.readouterr().out
    config = {"learning_rate": 1e-4, "lr_scheduler_type": "constant"}
    (tmp_path / "train_config.json").write_text(json.dumps(config))
    found = diagnosed(tmp_path)
    assert found.cause.rule == "schedule"
    assert "8 times the configured ones" in found.cause.message
    assert found.cause.tool.endswith("train_config.json")
    assert found.not_judged == {}
    (tmp_path / "config.json").write_text(json.dumps(config | {"learning_rate": 8e-4}))
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "2 configurations of the run have one (config.json, train_config.json)" in (
        capsys.readouterr().out
    )


def test_the_next_command_works_on_events_without_a_loss(tmp_path, capsys):
    lines = [
        {"kind": "metric", "name": "grad.norm", "value": 1.0, "step": 0},
        {"kind": "finding", "name": "block-scale", "severity": "error", "step": 3, "message": "m"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnosed(tmp_path)
    assert "only the findings of watch" in found.unreadable[str(tmp_path / "events.jsonl")]
    assert main(found.next.split()[1:]) == 1


def test_long_messages_end_with_a_word():
    from isobit.diagnosing.diagnosis import shortened

    text = shortened("words of seven " * 40)
    assert text.endswith((" words …", " of …", " seven …"))
    assert 280 < len(text) <= 300
    assert shortened("x" * 400) == "x" * 298 + " …"
    assert shortened("a\nb") == "a b"


def test_the_remedy_for_a_hang_has_the_name_that_torch_reads(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "TORCH_FR_BUFFER_SIZE" in capsys.readouterr().err
