"""The workflow of docs/how-to/use-it-in-your-ci.md runs on examples/ci, and fails where the project is broken."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/use-it-in-your-ci.md").read_text()
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml[^\n]*\n(.*?)```", PAGE, re.DOTALL)]
WORKFLOW, HOOKS = BLOCKS
STEPS = WORKFLOW["jobs"]["isobit"]["steps"]
LINES = [step["run"] for step in STEPS if "run" in step and not step["run"].startswith("pip ")]
SAFE = (
    ["-P"] if sys.version_info >= (3, 11) else []
)  # the folder is not on the path of `isobit` either
SLOW = ("isobit certify", "isobit profile", "pytest")  # run by ./check --full


@pytest.fixture
def project(tmp_path):
    shutil.copytree(
        ROOT / "examples/ci",
        folder := tmp_path / "project",
        ignore=shutil.ignore_patterns(".isobit", "__pycache__"),
    )
    return folder


def run(line, folder):
    """Run one line as the workflow does; `isobit` and `pytest` are those of this Python."""
    command, *words = shlex.split(line)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *SAFE, "-m", command, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_page_runs_every_command_that_its_table_names():
    named = set(re.findall(r"^\| `(isobit \w+(?: lint)?|pytest --isobit)` \|", PAGE, re.M))
    assert len(named) == 9
    assert {name for name in named if not any(line.startswith(name) for line in LINES)} == set()
    assert len(LINES) == len(named)


@pytest.mark.parametrize(
    "line", [pytest.param(x, marks=[pytest.mark.full] * x.startswith(SLOW)) for x in LINES]
)
@pytest.mark.sweep(3)
def test_a_line_of_the_workflow_runs(line, project):
    done = run(line, project)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in re.findall(r"--(?:junit|sarif|html) (\S+)", line):
        text = (project / name).read_text()
        if name.endswith(".xml"):
            assert ElementTree.fromstring(text).iter("testcase")
        elif name.endswith(".sarif"):
            assert json.loads(text)["version"] == "2.1.0"
        else:
            assert text.lstrip().lower().startswith("<!doctype html")


BROKEN = {
    "isobit contract lint": ("centre-v1.contract.yaml", "relation: invariant", "relation: variant"),
    "isobit verify": ("row_kernels.py", "for row in x.contiguous()]", "for row in x.flip(0)]"),
    "isobit audit": ("tiny_model.py", "isobit.nn.Linear", "nn.Linear"),
    "isobit check": ("row_kernels.py", "wide = x.double()", "wide = x.double().round()"),
    "isobit preflight": ("train.py", "optimizer.zero_grad()", "pass"),
    "isobit profile": (
        "train.py",
        "batch_size=8,",
        "batch_size=8, collate_fn=lambda x: (__import__('time').sleep(1), torch.utils.data.default_collate(x))[1],",
    ),
    "isobit simulate": ("train.py", "sampler.set_epoch(epoch)", "pass"),
}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            name, marks=[pytest.mark.full] * (name not in ("isobit contract lint", "isobit verify"))
        )
        for name in BROKEN
    ],
)
@pytest.mark.sweep(1)
def test_a_step_fails_where_the_project_is_broken(command, project):
    name, right, wrong = BROKEN[command]
    text = (project / name).read_text()
    assert right in text
    (project / name).write_text(text.replace(right, wrong))
    line = next(line for line in LINES if line.startswith(command))
    done = run(line, project)
    assert done.returncode == 1, done.stdout + done.stderr


def test_the_hook_of_pre_commit_is_a_command():
    (hook,) = HOOKS["repos"][0]["hooks"]
    assert hook["entry"] == "isobit contract lint"
    assert re.search(hook["files"], "a/centre-v1.contract.yaml")


def test_the_names_of_the_workflow_are_those_of_the_example():
    text = " ".join(LINES)
    for name in ("row_kernels", "tiny_model", "train"):
        assert name in text
        assert (ROOT / f"examples/ci/{name}.py").is_file()
