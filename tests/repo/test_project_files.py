"""Files beside the package agree with it: versions, addresses, and what GitHub and citation tools read."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import isobit

ROOT = Path(__file__).parents[2]


def test_one_version():
    project = (ROOT / "pyproject.toml").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'version = "{isobit.__version__}"' in project
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


def test_the_installation_page_names_every_extra():
    project = (ROOT / "pyproject.toml").read_text()
    lines = project.split("[project.optional-dependencies]")[1].split("\n[project.")[0]
    extras = re.findall(r"^(\w+) = \[", lines, re.M)
    page = (ROOT / "docs/how-to/install.md").read_text()
    assert len(extras) >= 6
    assert [name for name in extras if f"| `{name}` |" not in page] == []
