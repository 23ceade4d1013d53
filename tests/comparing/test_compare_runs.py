"""FALSIFY-ALBOR-003: two runs of a clean script are equal; each planted cause is named, with step, tensor, operator."""

import json
import os

import pytest

from isobit.cli import main
from isobit.comparing.runs.report import OPERATOR, SCALAR
from isobit.comparing.runs.run import run_twice
from isobit.errors import ArgumentError
from tests.comparing.planted_scripts import PLANTED, write
from tests.guards.usual_faults import NEEDS, SCRIPTS
from tests.sweeps import mostly_full


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    return tmp_path


def applying(report):
    return [cause.name for cause in report.causes if cause.applies]


def test_a_clean_script_is_equal(here):
    report = run_twice(write(here), steps=3)
    found = report.comparison
    assert (report.exit_code, report.causes, report.runs) == (0, (), 2)
    assert found.steps == (3, 3)
    # Per step: one loss, four gradients, four parameters, four momenta.
    assert found.tensors == 3 * (1 + 4 + 4 + 4)
    assert found.operators > 30
    assert found.harmless == ()
    assert 0 < found.recording < 1


@pytest.mark.parametrize("name", mostly_full(PLANTED, ["torch is not seeded"]))
def test_a_planted_cause_is_named(name, here):
    planted, cause = PLANTED[name]
    report = run_twice(write(here, **planted), steps=2)
    assert report.exit_code == 1, name
    assert cause in applying(report), (name, report.causes, report.comparison.origin)
    allowed = {
        "environment": {"time or process number"},  # the variable is drawn from an identity
        "threads": {"time or process number"},
    }
    assert set(applying(report)) <= {cause} | allowed.get(cause, set()), report.causes
    changed = report.comparison.changed
    assert (changed.step, changed.what) == (0, "loss")
    if cause.startswith("operator"):
        origin = report.comparison.origin
        assert origin.why == OPERATOR
        assert (origin.call.operator, origin.call.module) == ("planted::roulette", "Net")
        assert origin.call.source.startswith("train.py:")


@pytest.mark.full
def test_a_difference_in_a_gradient_names_the_parameter_and_line(here):
    planted = {"gradients": "model.out.bias.grad.mul_(1 + step * (time.time() % 1))"}
    script = write(here, **planted)
    report = run_twice(script, steps=4, causes=False)
    found = report.comparison
    assert (found.changed.step, found.changed.what, found.changed.name) == (
        1,
        "gradient",
        "out.bias",
    )
    assert (found.origin.call.operator, found.origin.why) == ("aten::mul_", SCALAR)
    line = next(i for i, s in enumerate(script.read_text().splitlines(), 1) if "grad.mul_" in s)
    assert found.origin.call.source == f"train.py:{line}"


@pytest.mark.full
def test_a_backward_operator_has_the_place_of_its_forward(here):
    planted = {
        "before": "from torch.autograd import Function\n"
        "class Noisy(Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n        return g * (time.time() % 1)\n",
        "act": "return Noisy.apply(x)",
    }
    found = run_twice(write(here, **planted), steps=1, causes=False).comparison
    assert (found.changed.what, found.changed.name) == ("gradient", "fc.weight")
    assert found.origin.call.operator == "aten::mul"
    assert found.origin.call.backward


@pytest.mark.full
def test_a_tensor_that_only_logs_the_time_is_harmless(here):
    planted = {"after": "elapsed = torch.zeros(2) + time.time() % 1"}
    report = run_twice(write(here, **planted), steps=2)
    assert report.exit_code == 0
    assert report.comparison.harmless[0].why == SCALAR


@pytest.mark.full
def test_memory_that_was_never_written_is_named(here):
    """The contents are written past torch, as an allocator's old contents are: what it reuses is chance."""
    number = "struct.pack('f', 1 + int.from_bytes(os.urandom(3), 'little') / 2**24)"
    filler = f"e = torch.empty(1000); ctypes.memmove(e.data_ptr(), {number} * 1000, 4000); "
    planted = {
        "before": "import ctypes, struct",
        "batch": filler + "x = data + e[:48].reshape(8, 6)",
    }
    report = run_twice(write(here, **planted), steps=1, causes=False)
    assert applying(report) == ["memory that was never written"]


@pytest.mark.full
def test_two_causes_are_both_named(here):
    planted = {
        "batch": "random.shuffle(order); x = data[order[:4]]",
        "loss": "loss = loss * (1 + time.time() % 1)",
    }
    report = run_twice(write(here, **planted), steps=1)
    assert applying(report) == ["seed not set", "time or process number"]


@pytest.mark.full
def test_runs_that_take_different_paths(here):
    planted = {"loss": "loss = loss * 2 if os.getpid() % 2 else loss + 1"}
    for _ in range(8):  # process numbers of both runs may be both odd or both even
        found = run_twice(write(here, **planted), steps=1, causes=False).comparison
        if not found.equal:
            break
    assert found.changed.what == "loss"
    assert {found.origin.call.operator, found.origin.other.operator} == {"aten::mul", "aten::add"}


def test_the_script_is_run_as_python_would(here, capsys):
    (here / "app").mkdir()
    (here / "app" / "beside.py").write_text("VALUE = 3\n")
    script = write(
        here / "app",
        before="import beside, pickle\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].beside is beside\n"
        "assert sys.argv == [__file__, '--lr', '0.1'], sys.argv\n"
        "assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path\n"
        "assert os.getcwd() != sys.path[0] and 'PYTHONSAFEPATH' not in os.environ\n",
    )
    words = ["compare", "runs", str(script), "--steps", "1", "-q", "--json", "--html", "page.html"]
    assert main.main([*words, "--", "--lr", "0.1"]) == 0
    assert "equal: 1 steps" in (here / "page.html").read_text()
    record = json.loads(capsys.readouterr().out)
    assert record["equal"]
    assert record["arguments"] == ["--lr", "0.1"]
    assert record["comparison"]["steps"] == [1, 1]


@pytest.mark.full
def test_the_command_says_what_differs(here, capsys):
    planted, _ = PLANTED["the clock is in the loss"]
    assert main.main(["compare", "runs", str(write(here, **planted)), "--steps", "1", "-q"]) == 1
    shown = capsys.readouterr().out
    assert "first difference: step 0, loss" in shown
    assert "aten::mul" in shown
    assert "YES" in shown
    assert "DIFFER: 1 steps" in shown


@pytest.mark.full
def test_a_script_that_fails_or_does_not_train_is_not_equal(here, capsys):
    script = here / "train.py"
    for text, word in (
        ("raise RuntimeError('planted failure')", "planted failure"),
        ("import torch; torch.ones(2).sum()", "no step of a torch.optim optimizer"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os._exit(0)", "no step"),
    ):
        script.write_text(text)
        assert main.main(["compare", "runs", str(script), "-q"]) == 2
        assert word in capsys.readouterr().err
    assert main.main(["compare", "runs", str(here / "nothing.py"), "-q"]) == 2
    capsys.readouterr()


DISTRIBUTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).square().mean().backward()
optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_scripts_of_torchrun_and_of_gpus_get_a_remedy_that_works(here, monkeypatch):
    script = here / "train.py"
    script.write_text("raise AssertionError('Torch not compiled with CUDA enabled')")
    with pytest.raises(ArgumentError, match="remedy: pass --device cuda"):
        run_twice(script)
    script.write_text(DISTRIBUTED)
    with pytest.raises(ArgumentError, match="remedy: start it as torchrun's only rank: env") as e:
        run_twice(script)
    for pair in e.value.remedy.split("env ")[1].split(" isobit")[0].split():
        monkeypatch.setenv(*pair.split("="))
    assert run_twice(script, steps=1).comparison.steps == (1, 1)


ON_A_GPU = {"batch": "x = data[order].cuda()", "before": "torch.set_default_device('cuda')"}


@pytest.mark.full
def test_a_script_that_needs_a_gpu_is_served_one(here, capsys):
    script = write(here, **ON_A_GPU)
    assert main.main(["twice", str(script), "--steps", "2", "--quiet"]) == 0
    assert "; the CPU served the cuda device" in capsys.readouterr().out
    assert main.main(["twice", str(script), "--steps", "2", "--quiet", "--device", "cpu"]) == 2
    assert "remedy: pass --device cuda" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_usual_scripts_are_equal(path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    report = run_twice(path, steps=2, device="auto")
    assert (report.exit_code, report.comparison.steps, report.served) == (0, (2, 2), "cuda")


@pytest.mark.parametrize("name", mostly_full(PLANTED, ["torch is not seeded"]))
@pytest.mark.full
def test_served_devices_hide_no_cause(name, here):
    planted, cause = PLANTED[name]
    report = run_twice(write(here, **planted), steps=2, device="cuda")
    assert (report.exit_code, report.served) == (1, "cuda")
    assert cause in applying(report), (name, report.causes, report.comparison.origin)
    assert report.comparison.origin.call.source.startswith("train.py:")


RACE = """
import threading
seen = []
threads = [threading.Thread(target=lambda i=i: (time.sleep(0.001), seen.append(i))) for i in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.full
def test_the_order_of_threads_is_a_cause_with_served_devices_too(here):
    script = write(
        here, before=RACE, loss="loss = loss * sum(i * 7**n for n, i in enumerate(seen))"
    )
    report = run_twice(script, steps=1, device="cuda")
    assert (report.exit_code, "threads" in applying(report)) == (1, True), report.causes


@pytest.mark.full
def test_a_script_that_catches_everything_ends_too(here):
    script = write(here)
    text = script.read_text().replace(
        "    optimizer.step()",
        "    try:\n        optimizer.step()\n    except BaseException:\n        pass",
    )
    script.write_text(text)
    assert run_twice(script, steps=2).comparison.steps == (2, 2)


@pytest.mark.full
def test_workers_that_load_data_do_not_write_into_the_record(here):
    loader = "torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)"
    report = run_twice(write(here, batch=f"x = next(iter({loader}))"), steps=2)
    assert report.exit_code == 0


def test_records_are_removed(here, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(here / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (here / "tmp").mkdir()
    (here / "x.py").write_text("1/0")
    with pytest.raises(ArgumentError):
        run_twice(here / "x.py")
    assert not [n for n in os.listdir(here / "tmp") if n.startswith("isobit")]
