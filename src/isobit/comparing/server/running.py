"""Run the axes of a server's audit: what is sent alone first, and then otherwise."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from isobit.comparing.server.completions import Answer, Completions, Prompt, backwards, beginning_of
from isobit.comparing.server.report import AXES, ServerAudit, Variant

# Compare a server's answers number by number.
#
# JSON has numbers as decimals. A server that prints enough digits shows all bits of a log-
# probability; numbers are read as 64-bit floating point and compared without tolerance. How many
# digits a server prints is reported beside.

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


Progress = Callable[[str, int, int], None]
APART = 0.03  # seconds between requests that arrive one by one, while others are served


class Turns:
    """Let tasks pass one after the other, in the order of their numbers."""

    def __init__(self) -> None:
        self._changed, self._next = threading.Condition(), 0

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Wait until all lower numbers have passed; the turn is passed on also after an error."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)
        try:
            yield
        finally:
            with self._changed:
                self._next += 1
                self._changed.notify_all()


class ServerRun:
    """The requests of one audit.

    [Note: what alone means] Each prompt is sent alone twice before anything is varied. The first answer, `cold`, is the
    one for which the server can have no keys in its prefix cache; it has no prompt log-probabilities, since servers do
    not read the cache for these. The second, `alone`, has them if the server returns them, and is what all axes but
    the prefix cache are compared with. Where a server ignores cache_salt, `alone` and all later requests find keys of
    the first: so each comparison is between requests in the same state of the cache, and only prefix-cache is not.
    """

    def __init__(
        self, completions: Completions, prompts: Sequence[Prompt], repeats: int, progress: Progress
    ) -> None:
        self._ask, self._prompts, self._repeats = completions, prompts, repeats
        self._every, self._progress, self._done = range(len(prompts)), progress, 0
        self._stage, self._total = "", len(prompts)
        self.notes: list[str] = []

    def run(self, axes: Sequence[str]) -> list[Variant]:
        """Return the variants of all axes."""
        self._begin("settling what the server returns", 1)
        self._ask.settle(backwards(self._prompts[0]))  # not the prompt: its keys would be cached
        self._begin("cold", len(self._prompts))
        if "prefix-cache" in axes:
            self._ask.reset_cache()
        self._salts = [self._ask.new_salt() for _ in self._prompts]
        self._cold = [self._alone(at, salt=self._salts[at], echo=False) for at in self._every]
        if any(one.cached for one in self._cold):
            self.notes.append(
                "the server had keys of these prompts before the first request: pass another --seed"
            )
        self._begin("alone", len(self._prompts))
        self.alone = [self._alone(at) for at in self._every]
        makers = {
            "repeats": self._vary_repeats,
            "batch": self._vary_batch,
            "order": self._vary_order,
            "prefix-cache": self._vary_cache,
            "concurrency": self._vary_concurrency,
        }
        return [variant for axis in axes for variant in makers[axis]()]

    def _begin(self, stage: str, total: int) -> None:
        self._stage, self._total, self._done = stage, total, 0

    def _count(self, requests: int = 1) -> None:
        self._done += requests
        self._progress(self._stage, self._done, self._total)

    def _alone(self, at: int, salt: str = "", echo: bool = True) -> Answer:
        (answer,) = self._ask.read(
            self._ask.send([self._prompts[at]], salt=salt, echo=echo).finish(), 1
        )
        self._count()
        return answer

    def _together(
        self, order: Sequence[int], level: int, apart: float = 0.0
    ) -> list[tuple[int, Answer]]:
        """Send prompts in this order, at most `level` at a time; return answers with the prompts' numbers."""
        turns = Turns()

        def ask(place: int, at: int) -> tuple[int, Answer]:
            with turns.take(place):
                exchange = self._ask.send([self._prompts[at]], echo=True)
                time.sleep(apart)
            (answer,) = self._ask.read(exchange.finish(), 1)
            return at, answer

        with ThreadPoolExecutor(level) as pool:
            futures = [pool.submit(ask, place, at) for place, at in enumerate(order)]
            try:
                found = [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        self._count(len(found))
        return found

    # ---- axes ---------------------------------------------------------------------------------------------

    def _vary_repeats(self) -> Iterator[Variant]:
        self._begin("repeats", self._repeats * len(self._prompts))
        found = [(at, self._alone(at)) for _ in range(self._repeats) for at in self._every]
        yield compare_answers("repeats", f"{self._repeats} more times", self.alone, found)

    def _vary_batch(self) -> Iterator[Variant]:
        sizes = self._levels()
        self._begin("batch", len(sizes) * len(self._prompts))
        for size in sizes:
            found: list[tuple[int, Answer]] = []
            for start in range(0, len(self._prompts), size):
                numbers = self._every[start : start + size]
                reply = self._ask.send([self._prompts[at] for at in numbers], echo=True).finish()
                if reply.status in (400, 422) and not found:
                    reason = f"the server refuses a list of prompts: {reply.words}"
                    yield Variant("batch", f"{size} prompts", reason=reason)
                    return
                found += zip(numbers, self._ask.read(reply, len(numbers)), strict=True)
                self._count(len(numbers))
            yield compare_answers("batch", f"{size} prompts", self.alone, found)

    def _vary_order(self) -> Iterator[Variant]:
        count = len(self._prompts)
        shuffled = random.Random(0).sample(self._every, count)
        ways = {
            "reversed": (self._every[::-1], 0.0),
            "shuffled": (shuffled, 0.0),
            f"one by one, {APART * 1000:.0f} ms apart": (self._every, APART),
        }
        self._begin("order", len(ways) * count)
        for name, (order, apart) in ways.items():
            yield compare_answers(
                "order", name, self.alone, self._together(order, count, apart=apart)
            )

    def _vary_cache(self) -> Iterator[Variant]:
        self._begin("prefix cache", 3 * len(self._prompts))
        yield self._cached("sent before", lambda at: self._salts[at])
        yield self._cached("its first two thirds sent before", self._send_beginning)
        if self._ask.reset_cache():
            found = [(at, self._alone(at, salt=self._salts[at], echo=False)) for at in self._every]
            yield compare_answers("prefix-cache", "after /reset_prefix_cache", self._cold, found)

    def _send_beginning(self, at: int) -> str:
        salt = self._ask.new_salt()
        begun = self._ask.send([beginning_of(self._prompts[at])], salt=salt, tokens=1)
        self._ask.read(begun.finish(), 1)
        return salt

    def _cached(self, name: str, salt_of: Callable[[int], str]) -> Variant:
        """Send each prompt under a salt for which the server has keys, and count those that it used."""
        found, before = [], self._ask.count_cache_hits()
        for at in self._every:
            salt = salt_of(at)
            found.append((at, self._alone(at, salt=salt, echo=False)))
        told = [answer.cached for _, answer in found if answer.cached is not None]
        cached: int | None = sum(told) if told else None
        after = self._ask.count_cache_hits() if cached is None else None
        if before is not None and after is not None:
            cached = after - before
        variant = compare_answers("prefix-cache", name, self._cold, found, cached)
        if cached == 0 and variant.verdict == "kept":
            reason = (
                "the server used 0 cached tokens: prompts are shorter than a block of its cache (pass longer ones by "
                "--shape or --inputs), or caching is off (leave the axis out by --vary)"
            )
            return Variant("prefix-cache", name, reason=reason, cached=0)
        if cached is None:
            self.notes.append(f"prefix-cache, {name}: the server does not report cached tokens")
        return variant

    def _vary_concurrency(self) -> Iterator[Variant]:
        levels = self._levels()
        self._begin("concurrency", len(levels) * len(self._prompts))
        for level in levels:
            yield compare_answers(
                "concurrency",
                f"{level} at a time",
                self.alone,
                self._together(self._every, level),
            )

    def _levels(self) -> list[int]:
        """Return 2, 4, 8, … up to the number of prompts, and at most 16."""
        return [size for size in (2, 4, 8, 16) if size <= len(self._prompts)]


def audit_server(
    completions: Completions,
    address: str,
    model: str,
    prompts: Sequence[Prompt],
    axes: Sequence[str] = tuple(AXES),
    *,
    tokens: int,
    repeats: int = 3,
    progress: Progress = lambda stage, done, total: None,
) -> ServerAudit:
    """Ask a server the same in several ways, and compare its answers with those to each prompt alone.

    Args:
        completions: Requests to the model.
        address: The server's address, for the record.
        model: The model's name, for the record.
        prompts: Two prompts or more.
        axes: Names of `AXES`.
        tokens: How many tokens `completions` asks for, for the record.
        repeats: How often each prompt is repeated.
        progress: Called with the stage, and how many requests of it are done.

    Returns:
        What was found.

    Raises:
        ServerError: If the server cannot be reached or answers something else; an axis whose requests alone are
            refused is reported as not judged.
    """
    completions.check_model()
    run = ServerRun(completions, prompts, repeats, progress)
    variants = run.run(axes)
    if not completions.salted and "prefix-cache" in axes:
        run.notes.append(
            "the server does not take cache_salt: if it has a prefix cache, it was warm on the other axes"
        )
    exact, rounded = describe_digits(run.alone)
    shown = [
        "token ids" if completions.has_ids else "tokens by their text",
        "their log-probabilities and those of the most likely tokens",
        "of prompts and answers" if completions.echoes else "of answers, not of prompts",
    ]
    compared = f"{', '.join(shown[:2])}, {shown[2]}; as 64-bit numbers, without tolerance; {exact}"
    return ServerAudit(
        address, model, len(prompts), tokens, tuple(variants), compared, (*rounded, *run.notes)
    )
