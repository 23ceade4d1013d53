"""The documentation is true: blocks run, printed output matches, commands parse, names and figures agree."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import isobit
from isobit.foundation.lazy import read_stub

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOT_PAGES = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")]
FENCE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
BLOCKS = {
    f"{page.relative_to(ROOT)}:{i}": found.groups()
    for page in PAGES
    for i, found in enumerate(FENCE.finditer(page.read_text()))
}


LONG_BLOCKS = {"docs/how-to/reveal.md:2"}


def test_there_are_blocks():
    assert any(name.startswith("README.md") for name in BLOCKS)
    assert sum(bool(output) for _, output in BLOCKS.values()) >= 2


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in LONG_BLOCKS)) for n in BLOCKS]
)
def test_python_blocks_run(name, capsys, tmp_path, monkeypatch):
    """A block runs by itself. `print(...)  # value` prints that value; a text block is all its output."""
    monkeypatch.chdir(tmp_path)  # where a block may write files
    block, output = BLOCKS[name]
    path = tmp_path / "block.py"
    path.write_text(block)
    if "os.environ" in block:  # it sets what must be set before torch is imported
        run = [sys.executable, str(path)]
        printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    else:
        exec(compile(block, str(path), "exec"), {"__name__": "readme"})
        printed = capsys.readouterr().out
    wanted = re.findall(r"^ *print\(.*\)\s+# (.+)$", block, re.MULTILINE)
    assert printed.split("\n")[: len(wanted)] == wanted or not wanted
    if output:
        assert without_stock_numbers(printed) == without_stock_numbers(output)


def without_stock_numbers(text):
    """Numbers of stock kernels depend on the machine; everything else must match."""
    lines = text.splitlines()
    return [re.sub(r"0x\w+|\d+", "#", s) if s.startswith("stock") else s for s in lines]


def test_a_wrong_output_is_noticed():
    assert without_stock_numbers("isobit 1") != without_stock_numbers("isobit 2")
    assert without_stock_numbers("stock 1 differ") == without_stock_numbers("stock 2 differ")
    assert without_stock_numbers("stock 1 differ") != without_stock_numbers("stock None")


OF_CONTRIBUTORS = (
    "add-an-operator.md"  # it writes a file of the package, which imports others of it
)


def test_pages_import_public_names_only():
    """A name that a page shows is listed in a stub, or is in a public module: it will not move without a warning."""
    modules = ("isobit.errors", "isobit.bits", "isobit.optim", "isobit.parallel.checkpoint")
    modules += ("isobit.reveal.targets", "isobit.guards.sinks")
    shown = {}
    for name, (block, _) in BLOCKS.items():
        if OF_CONTRIBUTORS in name:
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "isobit":
                shown |= {(node.module, alias.name): name for alias in node.names}
            elif isinstance(node, ast.Import):
                found = [one.name for one in node.names if one.name.startswith("isobit.")]
                shown |= {one.rpartition(".")[::2]: name for one in found}
    assert len(shown) > 20
    for (module, public), page in shown.items():
        stub = ROOT / "src" / module.replace(".", "/") / "__init__.pyi"
        listed = read_stub(str(stub)) if stub.exists() else {}
        assert module in modules or public in listed, f"{page}: {module}.{public}"


NEED_TRL = {"audit_trl_grpo.py"}  # 280 MB, installed by ./check --full
NEED_VLLM = {"grpo_vllm.py"}  # 3.5 GB, installed by ./setup_vllm
TESTED = {
    "accelerate_accumulation.py"
}  # its functions are run by tests/integrations/test_accelerate.py
LONG = {"zero_kl.py", "one_curve.py"}  # tens of seconds; zero_kl.py is the README's picture
LONG |= {"skeptics_hour.py"}  # its parts are run by test_skeptics_hour.py
FULL = NEED_TRL | NEED_VLLM | TESTED | LONG
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.full] * (path.name in FULL), id=path.name)
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_run(path, tmp_path):
    """Examples write only to the folder in which they are run."""
    if path.name in NEED_TRL:
        pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")
    if path.name in NEED_VLLM and not (ROOT / ".venv-vllm").exists():
        pytest.skip("needs ./setup_vllm")
    run = [sys.executable, str(path)]
    subprocess.run(run, check=True, capture_output=True, timeout=600, cwd=tmp_path)


def commands():
    for page in PAGES + ROOT_PAGES:
        for block in re.findall(r"```bash[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                found = re.match(r"(?:\w+=\S+ )*isobit (.*)", line)
                if found:
                    yield page.name, found[1]


def test_commands_in_pages_parse():
    """Every `isobit` line of a shell block has a command and options that exist."""
    from isobit.cli.main import parse

    lines = list(commands())
    assert len(lines) > 10
    for page, line in lines:
        try:
            words = shlex.split(line.partition(" -- ")[0], comments=True)
            parse(words)
        except SystemExit:
            pytest.fail(f"{page}: isobit {line}")


def test_every_public_name_is_in_the_reference():
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    shown = set(re.findall(r"^::: (isobit[\w.]*)$", text, re.MULTILINE))
    for owner, names in re.findall(
        r"^::: (isobit\S*)\n +options: \{members: \[(.*)\]\}", text, re.M
    ):
        shown |= {f"{owner}.{name.strip()}" for name in names.split(",")}
    whole = {"isobit.errors", "isobit.reveal.targets"}  # every member is shown
    assert whole <= shown
    rooms = ("parallel", "guards", "reveal", "simulator")
    for package in ("isobit", *(f"isobit.{room}" for room in rooms)):
        stub = ROOT / "src" / package.replace(".", "/") / "__init__.pyi"
        for name, home in read_stub(str(stub)).items():
            if home == package and package == "isobit":
                continue  # a submodule
            if home not in whole and f"{home}.{name}" not in whole:
                assert f"{package}.{name}" in shown, f"docs/reference/api lacks {package}.{name}"


def test_every_noun_of_the_architecture_is_in_the_glossary():
    nouns = (ROOT / "ARCHITECTURE.md").read_text().split("## Nouns")[1].split("\n[docs")[0]
    listed = re.split(r",\s+", nouns.split(":", 1)[1].split(".")[0].strip())
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    assert len(listed) > 15
    assert [noun for noun in listed if f"**{noun}**" not in glossary] == []


def test_pages_show_their_records():
    """Tables of docs/results and the README's costs are what the records hold."""
    from benchmarks.pages import main

    assert main(["--check"]) == 0


def test_the_picture_of_a_plan_is_current():
    sys.path.insert(0, str(ROOT / "docs" / "pictures"))
    try:
        from draw_plan import draw
    finally:
        sys.path.pop(0)
    for extent in (1536, 14336):
        assert (ROOT / "docs" / "pictures" / f"plan_{extent}.svg").read_text() == draw(extent)


@pytest.mark.parametrize("page", [PAGES[0], *ROOT_PAGES], ids=lambda p: p.name)
def test_links_of_root_pages_lead_somewhere(page):
    """Links between pages of the site are checked by `mkdocs build --strict`."""
    links = re.findall(r"\]\(([^)#]+)\)|^\[\w+\]: (\S+)$", page.read_text(), re.MULTILINE)
    for link in (inline or named for inline, named in links):
        assert "://" in link or (ROOT / link).exists(), f"{page.name}: {link}"


def test_the_version_in_pages_is_the_package_s():
    """Pages of results name the wheel that was measured."""
    versions = {
        found
        for page in PAGES
        if page.parent.name != "results"
        for found in re.findall(r"isobit-(\d+\.\d+\.\d+)-", page.read_text())
    }
    assert versions <= {isobit.__version__}
