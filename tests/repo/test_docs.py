"""README blocks and examples are run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {
    f"{page.relative_to(ROOT)}:{i}": block
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}


def test_there_are_blocks():
    assert any(name.startswith("README.md") for name in BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_run(name, capsys, tmp_path):
    """A block runs from nothing, in a file; where a line ends in `# value`, that is what it prints."""
    block = BLOCKS[name]
    path = tmp_path / "block.py"
    path.write_text(block)
    if "os.environ" in block:  # it sets what must be set before torch is imported
        printed = subprocess.run(
            [sys.executable, str(path)], check=True, capture_output=True, text=True
        ).stdout
    else:
        exec(compile(block, str(path), "exec"), {"__name__": "readme"})
        printed = capsys.readouterr().out
    wanted = re.findall(r"^print\(.*\)\s+# (.+)$", block, re.MULTILINE)
    assert printed.split("\n")[: len(wanted)] == wanted or not wanted


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    """Where they are run is where they may write."""
    subprocess.run(
        [sys.executable, str(path)], check=True, capture_output=True, timeout=120, cwd=tmp_path
    )


def test_commands_in_pages_exist():
    from isobit.cli.main import build_parser

    shells = [
        b for page in PAGES for b in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    used = set(re.findall(r"^isobit (\w+)", "\n".join(shells), re.MULTILINE))
    actions = build_parser()._subparsers._group_actions[0].choices
    assert used
    assert used <= set(actions)
