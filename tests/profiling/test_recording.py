"""`isobit profile train.py`: a script is recorded on gloo ranks, as torchrun would start it, and analysed."""

import json
import textwrap

import pytest

from isobit.cli.main import main

TRAIN = """
    import argparse, os, time
    import torch
    import torch.distributed as dist
    from torch import nn
    import beside  # a module next to the script

    parser = argparse.ArgumentParser()
    parser.add_argument("--late", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert rank == int(os.environ["LOCAL_RANK"]) and dist.get_world_size() == 2
    if options.fail and rank == 1:
        raise ValueError("no such file: data.bin")

    class Late(torch.utils.data.Dataset):
        def __len__(self):
            return 8 * options.steps

        def __getitem__(self, index):
            if rank == options.late:
                time.sleep(0.01)
            return torch.full((64,), index / 100)

    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))

    class Twice(torch.optim.AdamW):  # its step calls that of its parent: one step
        def step(self, closure=None):
            return super().step(closure)

    optimizer = Twice(model.parameters())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        for x in torch.utils.data.DataLoader(Late(), 8):
            model(x).pow(2).mean().backward()
            try:
                optimizer.step()
            except Exception:
                raise SystemExit("the end of the recording is not an error of the script")
            other.step()
            schedule.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    print("trained to the end")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    return path


def test_a_script_is_recorded_on_two_ranks_and_its_late_rank_named(script, tmp_path, capsys):
    words = [
        "profile",
        str(script),
        "--ranks",
        "2",
        "--steps",
        "3",
        "--keep",
        str(tmp_path / "out"),
    ]
    words += ["--json", "--", "--late", "1"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)["profile"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["world"] == 2
    for rank in found["ranks"]:
        assert [step["step"] for step in rank["steps"]] == [f"ProfilerStep#{n}" for n in (3, 4, 5)]
        whole = rank["whole"]
        assert sum(whole["parts"].values()) == whole["total"]
    late = [one for one in found["findings"] if one["rule"] == "slow-rank"]
    assert [one["rank"] for one in late] == [1]
    assert "data loader" in late[0]["detail"]
    assert any("without the profiler a step took" in note for note in found["notes"])
    # The optimizer's annotation is inside its step: the recording does not cut it.
    events = json.loads((tmp_path / "out" / "rank1.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("Optimizer.step#Twice") for name in names) == 3
    assert "trained to the end" not in (tmp_path / "out" / "rank0.output").read_text()


@pytest.mark.full
def test_a_script_that_fails_or_takes_too_few_steps_could_not_run(script, tmp_path, capsys):
    words = ["profile", str(script), "--ranks", "2"]
    assert main([*words, "--", "--fail"]) == 2
    said = capsys.readouterr().err
    assert "exit code 1 of rank 1" in said
    assert "no such file: data.bin" in said
    assert main([*words, "--", "--steps", "4"]) == 2
    said = capsys.readouterr().err
    assert "4 steps of a torch.optim.Optimizer" in said
    assert "--warmup 1 --steps 1" in said


def test_options_of_a_script_are_refused_with_traces(script, tmp_path, capsys):
    for words in (
        ["trace.json", "--ranks", "2"],
        ["trace.json", "--", "--lr"],
        [str(script), str(script)],
        [str(script), "--compare"],
        [str(tmp_path / "none.py")],
    ):
        assert main(["profile", *words]) == 2
        assert "expected" in capsys.readouterr().err
