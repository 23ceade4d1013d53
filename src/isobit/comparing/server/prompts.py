"""Prompts that are sent to a server: random words, or lines of a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NoReturn

from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes

Prompt = str | list[int]
LARGEST_FILE = 64 << 20
TEXT = (
    "river stone light morning question answer number letter city garden paper window table music "
    "winter summer engine metal forest island market school doctor teacher history science water fire "
    "quick slow bright dark early late north south east west small large round open"
)


def random_prompts(count: int, words: int, seed: int) -> list[Prompt]:
    """Return prompts of half as many to `words` words; the same for the same seed."""
    draw, known = random.Random(seed), TEXT.split()
    found: list[Prompt] = []
    for at in range(count):
        length = words - at * words // (2 * count)
        found.append(" ".join(draw.choice(known) for _ in range(max(length, 2))))
    return found


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a JSONL file: {"prompt": text} or {"input_ids": [numbers]} per line."""
    found: list[Prompt] = []
    try:
        lines = read_bytes(path, LARGEST_FILE).decode().splitlines()
    except UnicodeDecodeError as error:
        _refuse(f"{path}: {error}", error)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            _refuse(f"{path}:{number}: {error}", error)
        prompt = _prompt_of(entry)
        if prompt is None:
            _refuse(f"{path}:{number}: {line[:100]!r}")
        found.append(prompt)
    if len(found) < 2:
        _refuse(f"{path} with {len(found)}")
    return found


def _prompt_of(entry: Any) -> Prompt | None:
    if not isinstance(entry, dict):
        return None
    text, ids = entry.get("prompt"), entry.get("input_ids")
    if isinstance(text, str) and text:
        return text
    if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
        return ids
    return None


def beginning_of(prompt: Prompt) -> Prompt:
    """Return the first two thirds of a prompt: whole words, or token ids."""
    if isinstance(prompt, list):
        return prompt[: max(2 * len(prompt) // 3, 1)]
    words = prompt.split(" ")
    return " ".join(words[: max(2 * len(words) // 3, 1)])


def backwards(prompt: Prompt) -> Prompt:
    """Return a prompt of the same length that begins otherwise."""
    return prompt[::-1] if isinstance(prompt, list) else " ".join(prompt.split(" ")[::-1])


def _refuse(received: str, cause: Exception | None = None) -> NoReturn:
    raise ArgumentError(
        expected='two lines or more of {"prompt": text} or {"input_ids": [numbers]}',
        received=received,
        remedy="write one JSON object per line",
    ) from cause
