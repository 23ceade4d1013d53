"""`compare`: which of semantics, weights and numerics makes a rollout's log-probabilities differ from a trainer's."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.bits import as_integers
from isobit.comparing.checkpoints.weight_digests import compare_weights
from isobit.comparing.rollouts.reading import FileSide, Scored, Sequence, files_of, read
from isobit.comparing.rollouts.report import Finding, RolloutReport
from isobit.comparing.rollouts.semantics import (
    Aligned,
    Pairs,
    compare_declared,
    infer,
    merge_findings,
)
from isobit.comparing.rollouts.summary import Summary
from isobit.errors import ArgumentError
from isobit.foundation.addresses import Place
from isobit.foundation.engines import open_engine

# The mismatch of rollout and trainer under the names that RL frameworks log.
#
# Each is computed as its framework computes it, over the tokens that count: slime takes the mean of
# each sequence first, the others take the mean over tokens.


def mismatch_metrics(rollout: Many[Tensor], trainer: Many[Tensor]) -> dict[str, float]:
    """Return the metrics of log-probabilities, one pair of tensors per sequence.

    Args:
        rollout: Log-probabilities of the tokens that count, a tensor per sequence.
        trainer: The same by the trainer.

    Returns:
        Values by the names of slime, verl, prime-rl, NeMo-RL, TRL, TitanRL and open-instruct. Empty if there is no
        token.

    Example:
        >>> found = isobit.rollout.mismatch_metrics([torch.tensor([-1.0])], [torch.tensor([-1.5])])
        >>> found["train_rollout_logprob_abs_diff"], found["sampling/sampling_logp_difference/max"]
        (0.5, 0.5)
    """
    found = Summary()
    for mine, theirs in zip(rollout, trainer, strict=True):
        found.add(mine.double().numpy(), theirs.double().numpy(), [len(mine)])
    return found.metrics


def compare(rollout: Any, trainer: Any) -> RolloutReport:
    """Compare a rollout with a trainer, and say which of semantics, weights and numerics differs.

    Semantics come first, since values of different questions cannot be compared: sequences, token ids, shift, mask,
    positions, temperature, truncation, normaliser; those that are declared, then those that values reveal. Then weights
    by digests. What remains is numerics. Bits are compared, with no tolerance.

    Args:
        rollout: What the engine computed: a `Scored`, vLLM's list of RequestOutput, a mapping of arrays, or the path of
            a JSONL or Parquet file, or of a folder of them, which are read in one pass; see `isobit.rollout.read`.
        trainer: What the trainer computed for the same tokens, likewise.

    Returns:
        The report: findings with their class, and metrics under the names that RL frameworks log.

    Raises:
        ArgumentError: If a side cannot be read.

    Example:
        >>> ids, logprobs = [[5, 6, 7]], torch.tensor([[-1.0, -2.0, -0.5]])
        >>> rollout = {"prompt_token_ids": [[1, 2]], "token_ids": ids, "logprobs": logprobs}
        >>> isobit.rollout.compare(rollout, rollout).equal
        True
        >>> other = rollout | {"token_ids": [[5, 6, 8]]}
        >>> found = isobit.rollout.compare(rollout, other)
        >>> found.cause, found.findings[0].kind
        ('semantics', 'ids')
    """
    sides = [
        FileSide(files_of(one)) if isinstance(one, (str, Path)) else read(one)
        for one in (rollout, trainer)
    ]
    return compare_parts([compare_sides(*sides)])


def compare_on(rollout: Path | str, trainer: Path | str, on: str, jobs: int = 1) -> RolloutReport:
    """Compare folders of files as tasks of an engine: the k-th files of both sides are one task.

    Sequences whose partner is in another file wait until their task's result is merged; the metrics have the same bits
    as those of `compare`.

    Raises:
        ArgumentError: If the sides have different numbers of files, or one cannot be read.
    """
    sides = [files_of(rollout), files_of(trainer)]
    counts = [len(side) for side in sides]
    if counts[0] != counts[1]:
        raise ArgumentError(
            expected="as many files on both sides",
            received=f"{counts[0]} and {counts[1]}",
            remedy="cut both sides alike, or leave --on and --jobs out: then all files are read in one pass",
        )
    with open_engine(on, jobs) as pool:
        tasks = [
            pool.submit(compare_files, a, b, number, counts[0] > 1)
            for number, (a, b) in enumerate(zip(*sides, strict=True))
        ]
        return compare_parts([task.result() for task in tasks])


def compare_files(rollout: Place, trainer: Place, number: int, several: bool) -> Found:
    """Compare one file of each side."""
    found = compare_sides(*(FileSide((one,), number, several) for one in (rollout, trainer)))
    found.ids.fetch()  # its file is on the worker
    return found


def compare_sides(rollout: FileSide | Scored, trainer: FileSide | Scored) -> Found:
    """Compare two sides in one pass: what is found can be merged with what is found in other files."""
    found = Found()
    for pair in pair_up(found, iter_of(rollout), iter_of(trainer)):
        found.add_pair(pair)
    found.flush()
    found.weights = (rollout.weights, trainer.weights)
    found.previous = trainer.previous if trainer.previous is not None else rollout.previous
    found.ids.close()
    return found


def compare_parts(parts: Many[Found]) -> RolloutReport:
    """Merge what was found in parts of the data, in their order, and judge it."""
    found = parts[0]
    for one in parts[1:]:
        found.merge(one)
    found.flush()
    findings = [one for one in (found.missing(), *found.declared) if one is not None]
    weights, tensors, notes = found.compare_weights()
    findings += found.not_finite
    differs = found.tokens_differ > 0 or found.rows[1] > 0
    if differs and not findings:
        reason = infer(found.sample)
        findings += [] if reason is None else [reason]
        if reason is not None and found.sampled < found.tokens:
            notes.append(f"{reason.kind} was inferred from {found.sampled:,} tokens")
    if differs and not findings and not weights:
        findings.append(numerics(found, tensors))
    elif differs:
        notes.append("numerics were not judged: what comes before them differs")
    return RolloutReport(
        (*findings, *weights),
        found.summary.metrics,
        found.pairs,
        found.tokens,
        found.tokens_differ,
        *found.rows[:2],
        tensors,
        tuple(notes + found.undeclared()),
    )


# [Note: one pass over two files]
# Both sides are read in turns. A sequence waits until the other side's sequence of its id arrives, so files in one
# order need the memory of a few sequences; at most WAITING tokens wait, and files in orders that differ more raise an
# error. Pairs are judged in batches of BATCH tokens. What hypotheses are tested on (semantics.py) is a sample: the
# first SAMPLE tokens, or the first that differ if those do not.

WAITING = 1 << 20  # tokens
BATCH = 1 << 16  # tokens
SAMPLE = 1 << 17  # tokens
SAMPLE_VALUES = 1 << 24  # numbers of full rows


def iter_of(side: FileSide | Scored) -> Iterator[Sequence]:
    """Return the sequences of a side, one at a time."""
    return iter(side if isinstance(side, FileSide) else side.sequences)


def pair_up(
    found: Found, left: Iterator[Sequence], right: Iterator[Sequence]
) -> Iterator[tuple[Sequence, Sequence]]:
    """Yield pairs of one id as soon as both have arrived; the others stay in `found.waiting`."""
    sides: list[Iterator[Sequence] | None] = [left, right]
    while any(sides):
        for side, source in enumerate(sides):
            one = next(source, None) if source is not None else None
            if one is None:
                sides[side] = None
                continue
            pair = found.arrive(side, one)
            if pair is not None:
                yield pair


class IdDigests:
    """Counts ids that occur twice on a side: digests in memory up to a number, then in a file."""

    KEPT = 1 << 20  # digests in memory

    def __init__(self) -> None:
        """Know no id."""
        self.kept = bytearray()
        self.spilled: Path | None = None

    def add(self, side: int, name: str) -> None:
        """Add an id of a side."""
        text = f"{side}{name}".encode(errors="surrogatepass")
        self.kept += hashlib.blake2b(text, digest_size=16).digest()
        if len(self.kept) >= 16 * self.KEPT:
            self.close(spill=True)

    def close(self, spill: bool = False) -> None:
        """Write what is kept to the file if there is one, or if asked to."""
        if self.kept and (spill or self.spilled is not None):
            if self.spilled is None:
                handle, name = tempfile.mkstemp(prefix="isobit-ids-")
                os.close(handle)
                self.spilled = Path(name)
            with self.spilled.open("ab") as file:
                file.write(self.kept)
            self.kept.clear()

    def fetch(self) -> None:
        """Take what is in the file into memory, to be sent to another machine."""
        if self.spilled is not None:
            self.close()
            self.kept = bytearray(self.spilled.read_bytes())
            self.spilled.unlink()
            self.spilled = None

    def merge(self, other: IdDigests) -> None:
        """Add what another one has; its file is removed."""
        if other.spilled is not None:
            with other.spilled.open("rb") as file:
                while part := file.read(16 * self.KEPT):
                    self.kept += part
                    self.close(spill=True)
            other.spilled.unlink()
        self.kept += other.kept
        if len(self.kept) >= 16 * self.KEPT:
            self.close(spill=True)

    def count_doubled(self) -> int:
        """Return how many ids occurred before, and remove the file: a share of all digests at a time."""
        self.close()
        size = self.spilled.stat().st_size if self.spilled is not None else len(self.kept)
        shares = max(1, size // (16 * self.KEPT))
        doubled = 0
        for share in range(shares):
            found: list[Any] = []
            for part in self._parts():
                pairs = np.frombuffer(part, dtype=np.uint64).reshape(-1, 2)
                found.append(pairs[pairs[:, 0] % np.uint64(shares) == share])
            ids = np.concatenate(found) if found else np.zeros((0, 2), np.uint64)
            doubled += len(ids) - len(np.unique(ids, axis=0))
        if self.spilled is not None:
            self.spilled.unlink()
            self.spilled = None
        return doubled

    def _parts(self) -> Iterator[bytes]:
        if self.spilled is None:
            yield bytes(self.kept)
            return
        with self.spilled.open("rb") as file:
            while part := file.read(16 * self.KEPT):
                yield part


class Found:
    """What is known about two sides so far; it is of a bounded size, and two of them can be merged."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.sizes = [0, 0]
        self.ids = IdDigests()
        self.waiting: tuple[dict[str, Sequence], dict[str, Sequence]] = ({}, {})
        self.waits = 0  # tokens
        self.batch: Pairs = []
        self.batched = 0  # tokens
        self.pairs = self.tokens = self.tokens_differ = self.sampled = self.sampled_values = 0
        self.first = ""
        self.declared: list[Finding | None] = []
        self.of: list[int] = []
        self.not_finite: list[Finding] = []
        self.rows: tuple[int, int, int, int, float] = (0, 0, 0, 0, 0.0)
        self.starts: tuple[int, int, int] = (0, 0, 1 << 62)  # differing, aligned, least token
        self.open = {name: [True, True] for name in ("temperature", "top_k", "top_p")}
        self.widths: set[tuple[int, int]] = set()
        self.summary = Summary()
        self.sample: Aligned = []
        self.sample_differs = False
        self.weights: tuple[Any, Any] = (None, None)
        self.previous: Any = None

    def arrive(self, side: int, one: Sequence) -> tuple[Sequence, Sequence] | None:
        """Return the pair that a sequence completes; else let it wait."""
        self.sizes[side] += 1
        self.ids.add(side, one.id)
        other = self.waiting[1 - side].pop(one.id, None)
        if other is not None:
            self.waits -= len(other.tokens)
            self.pairs += 1
            return (other, one) if side else (one, other)
        if one.id not in self.waiting[side]:
            self.waiting[side][one.id] = one
            self.waits += len(one.tokens)
        if self.waits > WAITING:
            raise ArgumentError(
                expected=f"two sides in a similar order: at most {WAITING:,} tokens without a partner",
                received=f"{self.waits:,} tokens in {sum(map(len, self.waiting)):,} sequences, "
                f"such as {next(iter(self.waiting[0] or self.waiting[1]))!r}",
                remedy="write both sides in one order of their ids, or in several files of the same ids",
            )
        return None

    def add_pair(self, pair: tuple[Sequence, Sequence]) -> None:
        """Add a pair; a full batch is judged."""
        self.batch.append(pair)
        self.batched += len(pair[0].tokens) + 1
        if self.batched >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Judge the pairs that were added last."""
        pairs, self.batch, self.batched = self.batch, [], 0
        self._merge_declared(compare_declared(pairs))
        aligned = align(pairs)
        tokens, wrong, first = count_tokens(aligned)
        self.tokens, self.tokens_differ = self.tokens + tokens, self.tokens_differ + wrong
        self.first = self.first or first
        self._merge_rows(count_rows(aligned))
        self._merge_not_finite(not_finite(aligned))
        self._merge_starts(starts(aligned))
        mine, theirs = selected_by_sequence(aligned)
        if mine:
            lengths = [len(one) for one in mine]
            a, b = (torch.cat(side).double().numpy() for side in (mine, theirs))
            self.summary.add(a, b, lengths)
        for name, sides_open in self.open.items():
            for side in (0, 1):
                sides_open[side] &= all(getattr(p[side].policy, name) is None for p in pairs)
        self.widths |= {
            (a.rows.shape[-1], b.rows.shape[-1])
            for a, b in pairs
            if a.rows is not None and b.rows is not None
        }
        self._merge_sample(aligned, wrong > 0)

    def merge(self, other: Found) -> None:
        """Add what was found in a later part of the data; sequences that wait in both are paired."""
        self.flush()
        other.flush()
        for at in (0, 1):
            self.sizes[at] += other.sizes[at]
        self.ids.merge(other.ids)
        self._merge_declared(list(zip(other.declared, other.of, strict=True)))
        self.pairs += other.pairs
        self.tokens += other.tokens
        self.tokens_differ += other.tokens_differ
        self.first = self.first or other.first
        self._merge_rows(other.rows)
        self._merge_not_finite(other.not_finite)
        self._merge_starts(other.starts)
        self.summary.merge(other.summary)
        for name, sides_open in self.open.items():
            sides_open[:] = [x and y for x, y in zip(sides_open, other.open[name], strict=True)]
        self.widths |= other.widths
        self._merge_sample(other.sample, other.sample_differs)
        self.weights = tuple(
            mine if mine is not None else theirs
            for mine, theirs in zip(self.weights, other.weights, strict=True)
        )
        self.previous = self.previous if self.previous is not None else other.previous
        for side in (0, 1):
            for one in other.waiting[side].values():
                self.sizes[side] -= 1  # counted above
                ids, self.ids = self.ids, IdDigests()
                pair = self.arrive(side, one)
                self.ids = ids
                if pair is not None:
                    self.add_pair(pair)

    def missing(self) -> Finding | None:
        """Return what is on one side only, or twice on a side."""
        alone = sorted(set(self.waiting[0]) ^ set(self.waiting[1]))
        doubled = self.ids.count_doubled()
        if not alone and not doubled:
            return None
        a, b = self.sizes
        detail = f"{a} in the rollout and {b} in the trainer; {doubled} ids twice"
        first = f"sequence {alone[0]!r} is on one side only" if alone else ""
        return Finding("semantics", "sequences", detail, len(alone) + doubled, a + b, first)

    def compare_weights(self) -> tuple[list[Finding], int, list[str]]:
        """Return the tensors that differ, how many were compared, and a note if none could be."""
        if self.weights[0] is None or self.weights[1] is None:
            return [], 0, ["weights were not compared: a side has no digests"]
        found = compare_weights(*self.weights, previous=self.previous)
        return (
            [
                Finding(
                    "weights", one.kind, f"{one.name}: {one.detail}", one.rows, one.of, one.name
                )
                for one in found.differences
            ],
            found.tensors,
            [],
        )

    def undeclared(self) -> list[str]:
        """Return notes on what a side left open."""
        notes = []
        for name, sides in self.open.items():
            if self.pairs and sides[0] != sides[1]:
                notes.append(f"only the {'trainer' if sides[0] else 'rollout'} declares {name}")
        notes += [
            f"full rows of {x} and {y} tokens were not compared" for x, y in self.widths if x != y
        ]
        if self.pairs and not self.widths:
            notes.append(
                "full rows were not compared: equal tokens do not show equal distributions"
            )
        return notes

    def _merge_declared(self, found: Many[tuple[Finding | None, int]]) -> None:
        if not self.declared:
            self.declared, self.of = [None] * len(found), [0] * len(found)
        for at, (one, of) in enumerate(found):
            self.of[at] += of
            self.declared[at] = merge_findings(self.declared[at], one, self.of[at])

    def _merge_rows(self, found: tuple[int, int, int, int, float]) -> None:
        sums = [x + y for x, y in zip(self.rows[:4], found[:4], strict=True)]
        self.rows = (sums[0], sums[1], sums[2], sums[3], max(self.rows[4], found[4]))

    def _merge_not_finite(self, found: list[Finding]) -> None:
        total = 2 * self.tokens  # of both sides
        mine = self.not_finite[0] if self.not_finite else None
        merged = merge_findings(mine, found[0] if found else None, total)
        self.not_finite = [] if merged is None else [merged]

    def _merge_starts(self, found: tuple[int, int, int]) -> None:
        mine = self.starts
        self.starts = (mine[0] + found[0], mine[1] + found[1], min(mine[2], found[2]))

    def _merge_sample(self, aligned: Aligned, differs: bool) -> None:
        full = self.sampled >= SAMPLE or self.sampled_values >= SAMPLE_VALUES
        if full and (self.sample_differs or not differs):
            return
        if full:  # nothing in it differs, and here something does
            self.sample, self.sampled, self.sampled_values = [], 0, 0
        self.sample_differs |= differs
        self.sample += aligned
        self.sampled += sum(int(counts.sum()) for _, _, counts in aligned)
        self.sampled_values += sum(
            one.rows.numel() for a, b, _ in aligned for one in (a, b) if one.rows is not None
        )


def align(pairs: Pairs) -> Aligned:
    """Return the pairs whose values can be compared, with the tokens that count on both sides."""
    return [
        (a, b, a.counts & b.counts)
        for a, b in pairs
        if a.tokens == b.tokens and a.logprobs is not None and b.logprobs is not None
    ]


def selected_by_sequence(aligned: Aligned) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the log-probabilities that count, a tensor per sequence, of both sides."""
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for *pair, counts in aligned:
        for into, one in zip(sides, pair, strict=True):
            assert one.logprobs is not None
            into.append(one.logprobs[counts])
    return sides


def count_tokens(aligned: Aligned) -> tuple[int, int, str]:
    """Return how many log-probabilities count, how many differ in a bit, and the first."""
    total, wrong, first = 0, 0, ""
    for a, b, counts in aligned:
        assert a.logprobs is not None
        assert b.logprobs is not None
        apart = (as_integers(a.logprobs) != as_integers(b.logprobs)) & counts
        total, wrong = total + int(counts.sum()), wrong + int(apart.sum())
        if not first and bool(apart.any()):
            at = int(apart.nonzero()[0])
            values = f"{float(a.logprobs[at]):.9g} and {float(b.logprobs[at]):.9g}"
            first = f"sequence {a.id!r}, token {at} (id {a.tokens[at]}): {values}"
    return total, wrong, first


def count_rows(aligned: Aligned) -> tuple[int, int, int, int, float]:
    """Return how many values of full rows both have, how many differ, flips, rows, and the largest difference.

    A flip is a row in which another token has the largest value.
    """
    total = wrong = flips = rows = 0
    largest = 0.0
    for a, b, counts in aligned:
        if a.rows is None or b.rows is None or a.rows.shape != b.rows.shape:
            continue
        x, y = a.rows[counts], b.rows[counts]
        total, rows = total + x.numel(), rows + len(x)
        wrong += int((as_integers(x) != as_integers(y)).sum())
        apart = (x.double() - y.double()).abs()
        largest = max(
            largest, float(apart[apart.isfinite()].max()) if apart.isfinite().any() else 0.0
        )
        flips += int((x.argmax(-1) != y.argmax(-1)).sum()) if x.numel() else 0
    return total, wrong, flips, rows, largest


def not_finite(aligned: Aligned) -> list[Finding]:
    """Return a finding if a token that counts has NaN or an infinity: equal bits would hide it."""
    total = wrong = 0
    first = ""
    for *pair, counts in aligned:
        for side, one in zip(("rollout", "trainer"), pair, strict=True):
            assert one.logprobs is not None
            bad = ~one.logprobs.isfinite() & counts
            total, wrong = total + int(counts.sum()), wrong + int(bad.sum())
            if not first and bool(bad.any()):
                at = int(bad.nonzero()[0])
                first = f"{side}, sequence {one.id!r}, token {at}: {float(one.logprobs[at])}"
    if not wrong:
        return []
    detail = "log-probabilities of tokens that were drawn are not finite"
    return [Finding("numerics", "not finite", detail, wrong, total, first)]


def numerics(found: Found, tensors: int) -> Finding:
    """Return what remains: other arithmetic, or, where weights were not compared, one of the two."""
    metrics = found.summary.metrics
    most, mean = (metrics[f"sampling/sampling_logp_difference/{word}"] for word in ("max", "mean"))
    words = [f"log-probabilities differ by up to {most:.3g}, {mean:.3g} in the mean"]
    total, _, flips, rows, largest = found.rows
    if total:
        words.append(
            f"full rows: at most {largest:.3g}, {flips} of {rows} have another largest token"
        )
    differing, aligned, at = found.starts
    if differing:
        words.append(f"{differing} of {aligned} sequences differ, first at token {at}")
    cause, kind = ("numerics", "numerics") if tensors else ("undetermined", "weights or numerics")
    detail = "; ".join(words)
    return Finding(cause, kind, detail, found.tokens_differ, found.tokens, found.first)


def starts(aligned: Aligned) -> tuple[int, int, int]:
    """Return how many sequences differ, of how many, and the least token at which one begins to."""
    at = [1 << 62]
    for a, b, counts in aligned:
        assert a.logprobs is not None
        assert b.logprobs is not None
        apart = (as_integers(a.logprobs) != as_integers(b.logprobs)) & counts
        if bool(apart.any()):
            at.append(int(apart.nonzero()[0]))
    return len(at) - 1, len(aligned), min(at)
