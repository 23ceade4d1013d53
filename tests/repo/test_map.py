"""README's captioned map equals the files' first docstring lines."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def caption(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return text.splitlines()[0].removeprefix("// ")


def test_map_equals_the_files():
    readme = (ROOT / "README.md").read_text()
    block = readme.split("<!-- map -->")[1]
    shown = dict(re.findall(r"^(\S+\.(?:py|h|cpp))\s{2,}(.+)$", block, re.MULTILINE))
    files = [
        p
        for p in [*sorted((ROOT / "csrc").iterdir()), *sorted((ROOT / "src").rglob("*.py"))]
        if p.suffix in (".py", ".h", ".cpp") and p.name not in ("__init__.py", "__main__.py")
    ]
    wanted = {str(p.relative_to(ROOT)): caption(p) for p in files}
    assert len(wanted) > 20
    assert shown == wanted
