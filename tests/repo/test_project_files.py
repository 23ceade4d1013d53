"""Files beside the package agree with it: versions, addresses, and what GitHub and citation tools read."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import isobit

ROOT = Path(__file__).parents[2]


def test_one_version():
    project = (ROOT / "pyproject.toml").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert 'version = {attr = "isobit.__version__"}' in project
    assert citation["version"] == isobit.__version__


def test_no_address_that_is_not_the_project_s():
    """The accounts called isobit belong to other people: links are relative, and shipped code names no page."""
    foreign = re.compile(r"(github\.com|githubusercontent\.com)/isobit|isobit\.github\.io")
    named = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in named.stdout.splitlines() if (ROOT / name) != Path(__file__)]
    assert len(files) > 500
    texts = {p: p.read_text(errors="replace") for p in files if p.is_file()}
    assert [str(p.relative_to(ROOT)) for p, text in texts.items() if foreign.search(text)] == []


def test_the_table_of_whose_code_runs_has_every_command():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("<!-- commands -->")[2]
    commands = re.findall(r"^\| ([a-z][a-z ]*) \|", table.partition("<!-- /commands -->")[0], re.M)
    rows = [row for row in (ROOT / "SECURITY.md").read_text().splitlines() if row.startswith("|")]
    named = {
        word.removeprefix("isobit ").removeprefix("contract ")
        for row in rows
        for code in re.findall(r"`([^`]*)`", row.split("|")[1])
        for word in (
            code,
            code.partition(" package")[0],
            " ".join(code.split()[:2]),
            " ".join(code.split()[:3]),
        )
    }
    commands.remove("command")
    assert len(commands) > 25
    assert [c for c in commands if c.removeprefix("contract ") not in named] == []
    (scripts,) = (row for row in rows if "as `python script.py` would run it" in row)
    assert all(
        f"{name}`" in scripts for name in ("simulate", "preflight", "profile", "runs", "audit")
    )


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_forms_and_workflows_are_yaml(path):
    found = yaml.safe_load(path.read_text())
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert {"name", "description", "body"} <= set(found)


def test_workflow_runs_what_developers_run():
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for command in ("./check", "packaging/build_wheel", "mkdocs build --strict"):
        assert any(command in step for step in steps), command


def test_pre_commit_has_the_versions_of_check():
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for repository in hooks:
        tool = "ruff" if "ruff" in repository["repo"] else "clang-format"
        if tool in pinned:
            assert repository["rev"] == f"v{pinned[tool]}"


PROJECT = (ROOT / "pyproject.toml").read_text()
# Python 3.10 has no tomllib.
CORE = ast.literal_eval(re.search(r"^dependencies = (.*)$", PROJECT, re.M)[1])
SECTION = PROJECT.split("[project.optional-dependencies]")[1].split("\n[project.")[0]
EXTRAS = {
    name: ast.literal_eval(text) for name, text in re.findall(r"^(\w+) = (\[.*\])", SECTION, re.M)
}


def test_the_installation_page_names_every_extra():
    page = (ROOT / "docs/how-to/install.md").read_text()
    assert len(EXTRAS) >= 6
    assert [name for name in EXTRAS if f"| `{name}` |" not in page] == []


def requirements(extra):
    """Return what an extra installs with the core; extras of ours that it names are replaced by what they install."""
    found = list(CORE)
    for one in EXTRAS[extra]:
        ours = re.fullmatch(r"isobit\[(.*)\]", one)
        inner = ours[1].split(",") if ours else ()
        found += [one for each in inner for one in requirements(each)] if ours else [one]
    return found


def test_the_core_needs_no_engine_and_no_storage():
    """`pip install isobit` stays light: ray, pyarrow and fsspec are imported where an option or a file needs them."""
    assert len(CORE) == 5
    code = (
        "import sys, isobit\n"
        "from isobit.cli import check, runlog, simulate, verify\n"
        "from isobit.cli.compare import checkpoints, rollouts\n"
        "from isobit.cli.gate import training\n"
        "from isobit.cli.main import main\n"
        "isobit.silu; import isobit.rollout, isobit.comparing\n"
        "print(sorted({'ray', 'pyarrow', 'fsspec', 's3fs', 'dask', 'submitit'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves_with_the_constraints(extra):
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    words += ["-c", str(ROOT / "constraints.txt"), *requirements(extra)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("marks", "expected"), [("not full", [0, 3, 6]), ("full or not full", list(range(10)))]
)
def test_a_sweep_runs_some_cases_and_all_of_them_in_full(tmp_path, marks, expected):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    full: x\n    sweep: x\n")
    (tmp_path / "test_swept.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('at', range(10))\n@pytest.mark.sweep(3)\n"
        "def test_case(at):\n    pass\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", marks, str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [int(n) for n in re.findall(r"test_case\[(\d+)\]", done.stdout)] == expected
