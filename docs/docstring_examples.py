"""Let griffe read `Example:` in docstrings as it reads `Examples:`, as Python code with its output."""

import re
from typing import Any

import griffe


class ReadExamples(griffe.Extension):
    """Rename the section while docstrings are collected; without it, doctests are shown as quotes."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE
            )
