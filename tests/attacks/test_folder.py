"""No command runs code of the current folder, except of packages that --trust (or the target of reveal) names.

A module planted in the folder under the name of something that torch, transformers, rich or Python itself imports
would run in every command if the folder were on the search path.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.errors import ContractError
from isobit.foundation.trusted_folder import guarded_path, serve_folder

PLANTED = (
    *(
        "dill",
        "numpy",
        "torch",
        "yaml",
        "rich",
        "opt_einsum",
        "pandas",
        "onnx",
        "blake3",
        "transformers",
        "triton",
    ),
    *(
        "pickle",
        "selectors",
        "struct",
        "signal",
        "secrets",
        "random",
        "typing",
        "argparse",
        "json",
        "copyreg",
    ),
)
HOSTILE = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\nraise ImportError\n"
CONTRACT = """
id: {id}
version: 0.1.0
title: Rows do not depend on their neighbours
subject: {subject}
obligations: [{{id: INV-001, text: rows}}]
inputs:
  rows: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [65], n: [64, 200]}}, rows: rows}}
claims:
  - {{id: rows, obligations: [INV-001], relation: invariant, under: [batch], inputs: rows, level: L2}}
"""
MINE = """
import mine.inner
def softmax(x):
    import isobit
    return isobit.softmax(x)
def total(x):
    return x.sum()
"""
SCRIPT = "import torch.distributed as dist\nimport dill_like\ndist.init_process_group('gloo')\ndist.barrier()\n"
# As the console script does it: the folder of the program is first on the path, the current one is not on it.
RUN = """
import sys
from isobit.cli.main import main
for line in open(sys.argv[1]):
    words = line.split()
    try:
        code = main(words[1:])
    except SystemExit as stop:
        code = stop.code
    assert code == int(words[0]), f"{line.strip()}: {code}"
"""
# verify comes before what loads torch by itself.
COMMANDS = """
0 lint y.contract.yaml
2 status y.contract.yaml
0 verify y.contract.yaml --level L2
0 replay y-v1/rows
0 explain y-v1
0 graph y.contract.yaml --format svg
0 new made-v1 --from mine:softmax
2 verify m.contract.yaml --level L2
0 verify m.contract.yaml --level L2 --trust mine
0 reveal sum --k 8
2 reveal sibling:total --k 8
0 reveal mine:total --k 8
0 reveal sibling:total --k 8 --trust other
0 simulate scripts/train.py --ranks 2 --seeds 1
0 doctor
0 --version
0 --help
2 verfy
"""


@pytest.fixture
def folder(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for name in PLANTED:
        (here / f"{name}.py").write_text(HOSTILE)
    (here / "y.contract.yaml").write_text(CONTRACT.format(id="y-v1", subject="isobit:softmax"))
    (here / "m.contract.yaml").write_text(CONTRACT.format(id="m-v1", subject="mine:softmax"))
    (here / "mine").mkdir()
    (here / "mine" / "__init__.py").write_text(MINE)
    (here / "mine" / "inner.py").write_text("")
    (here / "sibling.py").write_text("import other\ndef total(x):\n    return x.sum()\n")
    (here / "other.py").write_text("")
    (here / "scripts").mkdir()
    (here / "scripts" / "train.py").write_text(SCRIPT)
    (here / "scripts" / "dill_like.py").write_text(
        ""
    )  # a script's own folder is importable, as under python
    return here


def run(folder, *words):
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)


def ran(folder):
    return sorted(path.stem for path in folder.rglob("*.ran"))


def test_no_command_runs_what_the_folder_plants(folder, tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "commands").write_text(COMMANDS.strip())
    done = run(folder, str(tmp_path / "run.py"), str(tmp_path / "commands"))
    assert ran(folder) == []
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_neither_do_modules_run_by_name_nor_their_processes(folder):
    """`python -m` puts the current folder first on the path, and multiprocessing starts `python -c`, which does too."""
    (folder / "z.contract.yaml").write_text(CONTRACT.format(id="z-v1", subject="isobit:softmax"))
    words = ("verify", "z-v1", "m-v1", "--trust", "mine", "--level", "L2", "--jobs", "2")
    done = run(folder, "-m", "isobit", *words)
    assert ran(folder) == []
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 of 2 contracts kept up to L2, 2 judged now" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        ["gate", "model", "--model", "qwen3-tiny", "--no-stock"],
        [
            "gate",
            "training",
            "--workload",
            "tiny",
            "--transport",
            "gloo",
            "--layouts",
            "1x1x1",
            "2x1x1",
        ],
        ["reveal", "all_reduce", "--ranks", "2", "--elements", "2"],
    ],
    ids=lambda words: words[0],
)
def test_neither_do_commands_that_start_processes_or_load_transformers(folder, words):
    pytest.importorskip("transformers")
    done = run(folder, "-m", "isobit", *words)
    assert ran(folder) == []
    assert done.returncode in (0, 1), done.stderr[-2000:]


def test_the_current_folder_is_never_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "planted_a.py").write_text("")
    (tmp_path / "planted_b.py").write_text("")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path), list(sys.meta_path), os.environ.get("PYTHONSAFEPATH")
    with guarded_path():
        serve_folder(["planted_a"])
        serve_folder(["planted_a"])  # the second changes nothing
        assert len(sys.meta_path) == len(before[1]) + 1
        assert sys.meta_path[:-1] == before[1]  # whatever is installed comes first
        import planted_a

        assert Path(planted_a.__file__).parent == tmp_path
        with pytest.raises(ModuleNotFoundError):
            import planted_b  # noqa: F401
        child = run(tmp_path, "-c", "import sys; print(sys.path)").stdout
        assert "''" not in child
        assert str(tmp_path) not in child
    assert (list(sys.path), list(sys.meta_path), os.environ.get("PYTHONSAFEPATH")) == before
    sys.modules.pop("planted_a")


def test_a_folder_that_nobody_trusts_is_read_and_not_run(folder, monkeypatch):
    from isobit.contracts.judge.trusted_code import resolve
    from isobit.contracts.store.sources import find_package

    monkeypatch.chdir(folder)
    find_package.cache_clear()
    assert (
        Path(find_package("sibling").origin) == folder / "sibling.py"
    )  # evidence rests on its text
    with pytest.raises(ContractError, match="--trust sibling"):
        resolve("sibling:total", ())
    with guarded_path(), pytest.raises(ContractError, match="No module named 'other'"):
        resolve("sibling:total", ("sibling",))
    with guarded_path():
        assert resolve("sibling:total", ("sibling", "other")).__module__ == "sibling"
    assert ran(folder) == []
    for name in ("sibling", "other"):
        sys.modules.pop(name)
    find_package.cache_clear()
