"""Compare a server's answers number by number.

JSON has numbers as decimals. A server that prints enough digits shows all bits of a log-probability; numbers are read
as 64-bit floating point and compared without tolerance. How many digits a server prints is reported beside.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from isobit.comparing.server.completions import Answer
from isobit.comparing.server.records import Variant

FP32_DIGITS = 9  # decimal digits that tell any two fp32 numbers apart


def compare_answers(
    axis: str,
    name: str,
    alone: Sequence[Answer],
    found: Iterable[tuple[int, Answer]],
    cached: int | None = None,
) -> Variant:
    """Return how answers, each with the number of its prompt, differ from those of the prompts alone."""
    counts, by_prompt = Variant(axis, name, cached=cached), [[0, 0] for _ in alone]
    for at, answer in found:
        before = counts.differ + counts.changed, counts.values
        compare_answer(counts, at, alone[at], answer)
        by_prompt[at][0] += counts.differ + counts.changed - before[0]
        by_prompt[at][1] += counts.values - before[1]
    counts.by_prompt = tuple((differ, values) for differ, values in by_prompt)
    return counts


def compare_answer(counts: Variant, prompt: int, alone: Answer, other: Answer) -> None:
    """Compare token by token, up to the first token that is another: what follows has another context."""
    counts.requests += 1
    for at, (mine, theirs) in enumerate(zip(alone.tokens, other.tokens, strict=False)):
        place = f"prompt {prompt}, token {at}"
        counts.tokens += 1
        if mine != theirs:
            counts.changed += 1
            counts.note(f"{place}: {mine!r} and {theirs!r}")
            counts.left_out += len(alone.tokens) - at - 1
        rows = alone.top[at], other.top[at]
        pairs = [(key, rows[0].get(key), rows[1].get(key)) for key in {**rows[0], **rows[1]}]
        chosen = (mine, alone.chosen[at], other.chosen[at])
        # Of two tokens the log-probabilities are not of one thing; one that is in both rows is counted there.
        if mine == theirs and chosen not in pairs:
            pairs.append(chosen)
        for key, left, right in pairs:
            compare_value(counts, f"{place}, log p of {key!r}", left, right)
        if mine != theirs:
            return
    if len(alone.tokens) != len(other.tokens):
        counts.changed += 1
        counts.left_out += abs(len(alone.tokens) - len(other.tokens))
        counts.note(f"prompt {prompt}: {len(alone.tokens)} and {len(other.tokens)} tokens")


def compare_value(counts: Variant, place: str, left: float | None, right: float | None) -> None:
    """Compare two numbers by their bits; one that only one side has differs."""
    if left is None and right is None:
        return
    counts.values += 1
    if left is not None and right is not None:
        if struct.pack("<d", left) == struct.pack("<d", right):
            return
        counts.largest = max(counts.largest, abs(left - right))
    counts.differ += 1
    counts.note(f"{place}: {left!r} and {right!r}")


def describe_digits(answers: Sequence[Answer]) -> tuple[str, list[str]]:
    """Return how the server prints numbers, and a note if it rounds them."""
    values = [v for one in answers for v in one.chosen if v is not None]
    values += [v for one in answers for row in one.top for v in row.values()]
    whole = sum(struct.unpack("<f", struct.pack("<f", v))[0] == v for v in values if abs(v) < 3e38)
    digits = max((significant_digits(v) for v in values), default=0)
    words = f"{whole:,} of {len(values):,} numbers are exact fp32 values"
    if digits >= FP32_DIGITS:
        return words, []
    return words, [
        f"the server prints at most {digits} digits, and fp32 needs {FP32_DIGITS}: smaller differences are not seen"
    ]


def significant_digits(value: float) -> int:
    """Return the number of significant decimal digits of the shortest text that is this number."""
    mantissa = repr(abs(value)).partition("e")[0].replace(".", "")
    return len(mantissa.strip("0"))
