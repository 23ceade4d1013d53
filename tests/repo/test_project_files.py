"""Files beside the package agree with it: versions, addresses, and what GitHub and citation tools read."""

import re
from pathlib import Path

import pytest
import yaml

import isobit

ROOT = Path(__file__).parents[2]
HOME = "https://github.com/isobit/isobit"
PAGES = ("SECURITY.md", "CODE_OF_CONDUCT.md", "GOVERNANCE.md")


def test_one_version():
    project = (ROOT / "pyproject.toml").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'version = "{isobit.__version__}"' in project
    assert citation["version"] == isobit.__version__
    assert citation["repository-code"] == HOME


def test_one_address():
    files = [*PAGES, "pyproject.toml", "setup.py", "CITATION.cff"]
    text = "".join((ROOT / name).read_text() for name in files)
    assert set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", text)) == {HOME}


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
