"""Style that is worth enforcing: banned names, no environment variables, no words of elsewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "csrc", "tests", "benchmarks", "examples", "docs", "packaging")
FILES = sorted(
    p
    for folder in FOLDERS
    for p in (ROOT / folder).rglob("*")
    if p.suffix in (".py", ".cpp", ".h", ".md", ".yaml") and ".egg-info" not in str(p)
) + [p for p in (ROOT / n for n in ("README.md", "CHANGELOG.md", "setup.py")) if p.exists()]
PYTHON = [p for p in FILES if p.suffix == ".py"]

BANNED_STEMS = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core"}
BANNED_TEXT = {
    r"\bTODO\b": "file an issue",
    r"-march=native": "pinned flags only",
    r"/(work|root|home)/": "no machine's paths",
    r"flaky|reruns": "a test passes or fails",
}
THIS = Path(__file__).name


def test_file_names_explain_themselves():
    assert [p for p in FILES if p.stem in BANNED_STEMS] == []


def test_names_of_test_files_are_unique():
    """pytest imports tests by the name of their file: of two with one name, one is not collected."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 200
    assert {name for name in names if names.count(name) > 1} == set()


@pytest.mark.parametrize("pattern", BANNED_TEXT)
def test_banned_text(pattern):
    allowed = {THIS, "setup.py", "test_cli.py"}
    hits = [
        str(p.relative_to(ROOT))
        for p in FILES
        if p.name not in allowed and re.search(pattern, p.read_text())
    ]
    if pattern == r"-march=native":
        hits = [h for h in hits if not h.startswith("docs")]
    assert hits == [], BANNED_TEXT[pattern]


def test_no_environment_variable_is_read():
    source = [p for p in PYTHON if (ROOT / "src") in p.parents]
    # sources.py notes, in one place, those that choose an engine behind the code's back (Triton's interpreter, oneDNN's
    # and torch's instruction sets): evidence of one engine says nothing of another. Nothing is configured by them.
    readers = {p.name for p in source if re.search(r"\benviron\b|getenv", p.read_text())}
    # environment.py gives each simulated rank its own, for the programs that it runs, and reads none.
    # trusted_folder.py sets one for processes that commands start, and puts it back.
    # observer.py of `isobit compare runs` notes them, to say in which of them two runs of a script differ.
    # server.py of `isobit compare server` reads the key of the server that it asks, as OpenAI's clients do.
    # serving.py of vLLM's process sets those that say how its engine runs, and reads none.
    # kernel_run.py of `isobit check` sets Triton's interpreter aside, says so, and puts the variable back.
    assert readers == {
        "environment.py",
        "kernel_run.py",
        "observer.py",
        "server.py",
        "serving.py",
        "sources.py",
        "trusted_folder.py",
    }
    assert (
        len(
            re.findall(
                r"environ|getenv", (ROOT / "src/isobit/contracts/store/sources.py").read_text()
            )
        )
        == 1
    )
    native = [p for p in FILES if p.suffix in (".cpp", ".h")]
    assert [p.name for p in native if "getenv" in p.read_text()] == []
