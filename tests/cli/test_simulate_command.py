"""`isobit simulate` finds, names and replays, and says whether prints follow the schedule; exits with 0, 1 or 2."""

import json
import logging
import sys
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.cli.simulate import FAULTS, FINDINGS, WATCHES
from isobit.errors import SimulationError
from isobit.simulator import sweep
from isobit.simulator.faults import KINDS
from isobit.simulator.findings import WORDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "bugs" / "logging_deadlock.py"
START = "import sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"


@pytest.fixture
def write(tmp_path):
    def make(body):
        path = tmp_path / "script.py"
        path.write_text(START + body)
        return str(path)

    return make


def record(capsys, *words):
    code = main(["simulate", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_deadlock_is_named_and_replayed(tmp_path, capsys):
    page = tmp_path / "page.html"
    code = main(["simulate", str(EXAMPLE), "--ranks", "8", "--seeds", "2", "--html", str(page)])
    said = capsys.readouterr().out
    assert code == 1
    assert "0 of 2 seeds clean on 8 ranks" in page.read_text()
    assert "waiting for ranks 1–7" in page.read_text()
    assert "logging_deadlock.py:21" in page.read_text()
    assert "deadlock" in said
    assert "rank 0: " in said
    assert "logging_deadlock.py:21" in said
    assert f"again: isobit simulate {EXAMPLE} --ranks 8 --seed 0" in said
    assert "0 clean, 2 with findings" in said


def test_rank_zero_prints_once_and_arguments_pass(write, capsys):
    script = write(
        "total = torch.tensor([rank]); dist.all_reduce(total)\nprint('sum', int(total), *sys.argv[1:])\n"
    )
    code = main(["simulate", script, "--ranks", "3", "--seeds", "3", "--", "--lr", "0.5"])
    said = capsys.readouterr().out
    assert code == 0
    assert said.count("sum 3 --lr 0.5") == 1
    assert "prints agree over 3 clean seeds" in said


def test_streams_do_what_programs_ask_of_them(write, capsys, monkeypatch):
    monkeypatch.setattr(
        logging.root, "handlers", []
    )  # pytest's own, beside which basicConfig does nothing
    body = "import logging\nlogging.basicConfig(stream=sys.stdout, level='INFO', format='%(message)s')\n"
    body += "sys.stdout.reconfigure(line_buffering=True)\nassert sys.stdout.encoding\n"
    body += "sys.stdout.buffer.write(b'bytes ')\nlogging.info('a line')\ndist.barrier()\n"
    code, found = record(capsys, write(body), "--ranks", "2", "--seeds", "3")
    assert (code, found["printed"], found["prints_agree"]) == (0, ["bytes a line\n"] * 2, True)


def test_prints_that_follow_the_schedule_part(write, capsys):
    body = "x = torch.tensor([rank])\n"
    body += "if rank: dist.send(x, 0)\nelse:\n for _ in range(3): print(dist.recv(x))\n"
    code, found = record(capsys, write(body), "--seeds", "12")
    assert code == 0
    assert not found["prints_agree"]
    assert "rank 0, line" in found["prints_depart"]


def test_a_seed_replays_its_trace(write, capsys):
    script = write("for _ in range(3): dist.all_reduce(torch.ones(2))\n")
    _, many = record(capsys, script, "--seeds", "4")
    _, alone = record(capsys, script, "--seed", "3")
    assert alone["traces"] == {"3": many["traces"]["3"]}
    assert len(set(many["traces"].values())) == 4


def test_a_failure_of_the_script_is_a_finding(write, capsys):
    code, found = record(
        capsys, write("assert rank != 2, 'no room'\ndist.barrier()\n"), "--seeds", "1"
    )
    (finding,) = found["findings"]
    assert (code, finding["kind"], finding["ranks"]) == (1, "rank failed", [2])
    assert finding["first"]["cause"] == "AssertionError: no room"


def test_a_failed_rank_is_heard(write, capsys):
    body = "dist.barrier()\nif rank == 1:\n print('no such flag', file=sys.stderr)\n sys.exit(2)\n"
    code, found = record(capsys, write(body), "--seeds", "1")
    assert (code, found["findings"][0]["first"]["wrote"]) == (1, "no such flag")
    assert main(["simulate", write(body), "--seeds", "1"]) == 1
    assert "wrote: no such flag" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import no_such_module\n", "No module named 'no_such_module' on every rank"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('lr')\np.parse_args()\n",
            "required: lr",
        ),
    ],
)
def test_a_script_that_never_starts_is_two(write, capsys, body, said):
    assert main(["simulate", write(body)]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_says_nothing_to_others_tries_nothing(write, capsys):
    for words in ([], ["--json"]):
        assert main(["simulate", write("print(rank)\n"), "--seeds", "2", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "nothing was tried" in said.err
        assert "remedy: name the script that torchrun starts" in said.err
    assert main(["simulate", write("dist.barrier()\n"), "--seeds", "1"]) == 0


def test_faults_are_planted_by_seed(write, capsys):
    code, found = record(
        capsys, write("dist.barrier()\ndist.barrier()\n"), "--faults", "die", "--fault-calls", "2"
    )
    assert code == 1
    assert {finding["kind"] for finding in found["findings"]} == {"rank lost"}
    assert len(found["faults"]) == len(found["seeds"]) == 10
    assert "--faults die --fault-calls 2" in found["findings"][0]["replay"]


MEAN_OF_MEANS = """
torch.manual_seed(0)
ranks, model = dist.get_world_size(), torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
edges = [0, 1, 8] if ranks == 2 else [0, 8]
x = torch.randn(8, 4)[edges[rank] : edges[rank + 1]]
model(x).square().mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad, dist.ReduceOp.AVG)
optimizer.step()
print(ranks, "ranks")
"""


def test_one_worker_shows_what_replicas_hide(write, capsys):
    script = write(MEAN_OF_MEANS)
    assert main(["simulate", script, "--ranks", "2", "--seeds", "1"]) == 0
    capsys.readouterr()
    code, found = record(capsys, script, "--ranks", "2", "--seeds", "1", "--one-worker")
    assert code == 1
    assert found["findings"][0]["kind"] == "weights differ"
    assert (
        "rank 0 0.5 instead of 0.125, rank 1 0.5 instead of 0.875"
        in found["findings"][0]["first"]["text"]
    )
    assert found["printed"] == ["2 ranks\n"] * 2  # not those of the one worker as well


ALIKE = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
    for p in list(model.parameters())[: 2 if step < 2 else 1]:
        dist.all_reduce(p.grad)
    optimizer.step()
"""


def test_what_is_left_out_hides_nothing_behind_it(write, capsys):
    script = write(ALIKE)
    _, found = record(capsys, script, "--seeds", "1")
    kinds = [finding["kind"] for finding in found["findings"]]
    assert kinds == ["random numbers alike", "gradients differ"]
    _, found = record(capsys, script, "--seeds", "1", "--ignore", "random numbers alike")
    assert [finding["kind"] for finding in found["findings"]] == ["gradients differ"]
    assert "0.bias differs at step 2" in found["findings"][0]["first"]["text"]


def test_a_kind_can_be_left_out(write, capsys):
    script = write("if rank: dist.send(torch.ones(1), 0)\n")
    assert main(["simulate", script, "--ranks", "2", "--seeds", "1"]) == 1
    assert main(["simulate", script, "--ranks", "2", "--seeds", "1", "--ignore", "orphan"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "received: no such file: missing.py"),
        ([str(EXAMPLE), "--one-worker", "--watch", "bits"], "received: --watch bits"),
    ],
)
def test_what_cannot_run_is_two(words, said, capsys):
    assert main(["simulate", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("isobit simulate: expected ")
    assert said in shown
    assert "\n  remedy: " in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "--ranks: expected a whole number from 1; received '0'"),
        (["--seeds", "x"], "--seeds: expected a whole number from 1; received 'x'"),
        (["--ignore", "foo"], "--ignore: invalid choice: 'foo'"),
    ],
)
def test_options_that_make_no_sense_are_two(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", str(EXAMPLE), *words])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_every_kind_of_finding_can_be_ignored():
    """The options are read without torch, so they list what the simulator can find."""
    assert set(WORDS) <= set(FINDINGS)
    assert {error.kind for error in SimulationError.__subclasses__()} - {"fault"} <= set(FINDINGS)
    assert set(FAULTS.values()) == set(KINDS)
    assert WATCHES == sweep.WATCHES


def test_what_was_not_judged_is_printed_with_clean(write, capsys):
    script = write("dist.barrier()\n")
    assert main(["simulate", script, "--ranks", "2", "--seeds", "1", "--ignore", "orphan"]) == 0
    said = capsys.readouterr().out
    assert "1 clean, 0 with findings; 4 checks not judged:" in said
    assert "not judged: training: no optimizer of torch made a step" in said
    assert "not judged: orphan: --ignore leaves it out" in said
    _, found = record(capsys, script, "--ranks", "2", "--seeds", "1", "--watch", "bits")
    assert found["not_judged"]["training"] == "not in --watch"


def test_rpc_is_two_at_once(write, capsys):
    start = "import torch.distributed.rpc as rpc\n"
    for before in ("", "dist.barrier()\n"):
        body = start + before + "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
        assert main(["simulate", write(body), "--ranks", "2"]) == 2
        said = capsys.readouterr().err
        assert "received: torch.distributed.rpc, which isobit.simulator does not support" in said
        assert "script.py:" in said
        assert "remedy: simulate the parts of the script that use collectives" in said


def test_a_kernel_that_needs_a_gpu_is_two(write, tmp_path, monkeypatch, capsys):
    """TRL's losses launch Triton kernels on a device that the simulator serves."""
    triton = tmp_path / "site-packages" / "triton"
    triton.mkdir(parents=True)
    (triton / "__init__.py").write_text("def launch():\n    raise AssertionError('no libcuda')\n")
    body = f"dist.barrier()\nsys.path.insert(0, {str(triton.parent)!r})\n"
    body += "for name in [n for n in sys.modules if n.split('.')[0] == 'triton']: del sys.modules[name]\n"
    body += "import triton\ntriton.launch()\n"
    with monkeypatch.context() as patch:
        for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
            patch.setitem(sys.modules, name, sys.modules[name])
        assert main(["simulate", write(body), "--ranks", "2", "--seeds", "1"]) == 2
    said = capsys.readouterr().err
    assert "received: a Triton kernel, which needs a GPU, at " in said
    assert "script.py:8 in <module>" in said
    assert "use_cpu=True" in said


def test_a_script_that_is_no_python_is_two(write):
    assert main(["simulate", write("if:\n")]) == 2


def test_the_process_is_as_before(write, capsys):
    before = sys.argv, sys.stdout, list(sys.path), sys.modules["__main__"]
    main(
        [
            "simulate",
            write("import os; os.environ['RANK'] = '9'; sys.argv.append('x')\n"),
            "--seeds",
            "1",
        ]
    )
    assert (sys.argv, sys.stdout, list(sys.path), sys.modules["__main__"]) == before
