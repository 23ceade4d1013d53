"""Remove from text what could control a terminal or a page: escape sequences and control characters."""

from __future__ import annotations

import json
import re
import unicodedata

# CSI (colours, cursor), then OSC, DCS, SOS, PM and APC up to their end, then what is two characters long.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_LINES = re.compile(r"\r\n?|[\u2028\u2029]")
# Cc control, Cf format (bidi overrides, zero width), Cs half a surrogate pair, which UTF-8 cannot encode.
_REMOVED = ("Cc", "Cf", "Cs")
_NONE = "\ufffe\uffff"  # not characters, and not allowed in XML


def plain(text: str) -> str:
    """Remove escape sequences and control characters; keep newlines and tabs."""
    if text.isprintable():
        return text
    text = _LINES.sub("\n", _SEQUENCE.sub("", text))
    return "".join(
        c for c in text if c in "\n\t" or not (c in _NONE or unicodedata.category(c) in _REMOVED)
    )


def one_line(text: str) -> str:
    """Do the same and join lines, where a newline would forge a line of its own."""
    return " ".join(plain(text).split()) if not text.isprintable() else text


def plain_json(text: str) -> str:
    """Write such characters in JSON as escapes, so that nothing is lost."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)
