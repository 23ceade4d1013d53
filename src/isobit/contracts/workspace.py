"""A tree of contracts with its evidence: where each stands, what has to be judged again, and the judging."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from isobit.contracts.judge.reach import Reach
from isobit.contracts.language.load import load_contract
from isobit.contracts.store import ladder
from isobit.contracts.store.evidence import Evidence, Finding, merge_records
from isobit.contracts.store.shipped import ShippedEvidence
from isobit.contracts.store.sources import INTERPRET, engine_variables, machine
from isobit.contracts.store.tree import HOME, Entry, Tree, library
from isobit.errors import ContractError, IsobitError, in_one_line
from isobit.records import ClaimRecord, ContractStatus

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

THOROUGH = " thorough"  # no name of a subject holds a space


@dataclass(frozen=True)
class Run:
    """What one verification is asked to do; plain data, so that it can be sent to another process."""

    trusted: tuple[str, ...] = ()
    level: int = 4
    thorough: bool = False
    subject: str = ""
    seconds: float = float("inf")


@dataclass(frozen=True)
class Judged:
    """What judging one contract gave: records, the files that its code reached, and the engine that ran."""

    records: tuple[ClaimRecord, ...]
    files: tuple[tuple[str, str], ...]
    engine: str


class Workspace:
    """Contracts below some folders, and the evidence kept beside them."""

    def __init__(self, folders: Sequence[Path], home: Path | None = None) -> None:
        self.folders = tuple(folders)
        first = folders[0] if folders else Path()
        self.home = home or (first if first.is_dir() else first.parent) / HOME
        self.tree = Tree(folders, self.home)
        self.evidence = Evidence(self.home)
        self.shipped = ShippedEvidence(self.tree)

    def choose(
        self, ids: Sequence[str], subject: str = "", shard: tuple[int, int] = (1, 1)
    ) -> list[Entry]:
        """By id, or all of the tree; with a named subject, those that know it; of a shard, by a hash of the id."""
        entries = [self.tree.find(id) for id in (ids or self.tree.chosen)]
        if subject and ":" not in subject:
            entries = [e for e in entries if subject in e.subjects]
        index, count = shard
        return [
            e
            for e in entries
            if int(blake3(e.id.encode()).hexdigest()[:8], 16) % count == index - 1
        ]

    def require(self, keys: Sequence[Ed25519PublicKey]) -> None:
        """Counts only evidence that one of the keys has signed, and trusts no cache that may have come with it."""
        self.evidence.keys = tuple(keys)
        self.tree = Tree(self.folders, self.home, cached=False)

    def status(self, entry: Entry, subject: str = "", claims: bool = False) -> ContractStatus:
        """From evidence at the present digest alone; with `claims`, each claim's record too."""
        named = subject.removesuffix(THOROUGH)
        stands = ContractStatus(
            id=entry.id,
            version=entry.version,
            title=entry.title,
            path=entry.path,
            digest="",
            verdict="not-judged",
            level=0,
            required=entry.required,
            depends_on=entry.depends_on,
            obligations=entry.obligations,
            subject=entry.subjects.get(named, named) or entry.subject,
        )
        try:
            digest = self.tree.digest(entry.id, subject)
        except IsobitError as error:
            return replace(stands, verdict="could-not-run", detail=in_one_line(error))
        stands = replace(stands, digest=digest)
        outline = entry.outline()
        findings = self.evidence.read(digest, outline)
        if not findings:
            word, why = self._without_evidence(entry, subject, digest)
            shown = None if subject or self.evidence.keys else self.shipped.status_of(entry)
            return replace(stands, verdict=word, detail=why, shipped=shown)
        records: Sequence[ClaimRecord] = merge_records(findings)
        if entry.waivers:
            contract = load_contract(Path(entry.path))
            records = [ladder.waive(contract, r) for r in records]
        verdict, level = (
            ladder.contract_verdict(outline, records),
            ladder.contract_level(outline, records),
        )
        said = (
            f"kept as far as L{level}, must reach L{entry.required}"
            if verdict == "below-level"
            else ""
        )
        return replace(
            stands,
            verdict=verdict,
            level=level,
            detail=said,
            claims=tuple(records) if claims else (),
        )

    def _without_evidence(self, entry: Entry, subject: str, digest: str) -> tuple[str, str]:
        """The word for a contract that nothing is known of, and why."""
        if entry.unlinked or not entry.claims:
            said = (
                "no evidence at its present digest"
                if entry.claims
                else "nothing in it is executable"
            )
            return "unbound", said + (
                f"; not linked: {', '.join(entry.unlinked)}" if entry.unlinked else ""
            )
        elsewhere = self._elsewhere(entry, subject)
        reasons = (self.evidence.why_not(digest), elsewhere and f"evidence exists {elsewhere}")
        said = "; ".join(reason for reason in reasons if reason)
        return "not-judged", said or "no evidence at its present digest"

    def _elsewhere(self, entry: Entry, subject: str) -> str:
        """Under which other settings of this machine there is evidence: `under A=1`, `without A=1`."""
        here = engine_variables()
        others = [
            ({k: v for k, v in here.items() if k != name}, f"without {name}={here[name]}")
            for name in here
        ]
        if INTERPRET not in here:
            others.append(({**here, INTERPRET: "1"}, f"under {INTERPRET}=1"))
        there = [
            said
            for v, said in others
            if self.evidence.has(self.tree.digest(entry.id, subject, machine(v)))
        ]
        return there[0] if there else ""

    def statuses(
        self, entries: Sequence[Entry], subject: str = "", claims: bool = False, level: int = 4
    ) -> list[ContractStatus]:
        """Of each; a contract that rests on one that is not kept, as far as `level`, is not kept either."""
        known: dict[str, ContractStatus] = {}
        chosen = {entry.id for entry in entries}
        for entry in self.with_dependencies(entries):
            own = subject if entry.id in chosen else ""
            status = self.status(entry, own, claims or level < 4)
            weak = [
                known[d]
                for d in status.depends_on
                if d in known and verdict_at(known[d], level) != "kept"
            ]
            if weak:
                detail = f"rests on {weak[0].id}, which is {weak[0].verdict}"
                word = weak[0].verdict if weak[0].verdict in ladder.UNSETTLED else "could-not-run"
                word = ladder.worst([status.verdict, word])
                status = replace(
                    status, verdict=word, level=0, weak=weak[0].id, detail=status.detail or detail
                )
            known[entry.id] = status
        return [known[entry.id] for entry in entries]

    def with_dependencies(self, entries: Sequence[Entry]) -> list[Entry]:
        """And all that they rest on, that first."""
        names = {entry.id: entry for entry in entries}
        queue = list(entries)
        while queue:
            for name in queue.pop().depends_on:
                known = self.tree.entries.get(name)
                if known is not None and name not in names:
                    names[name] = known
                    queue.append(known)
        return self.in_order(list(names.values()))

    def stale(self, entries: Iterable[Entry], run: Run) -> list[Entry]:
        """Those without evidence at their present digest, at the level asked for; dependencies first."""
        found = []
        for entry in entries:
            try:
                findings = self.evidence.read(
                    self.tree.digest(entry.id, key_of(run)), entry.outline()
                )
            except ContractError:
                found.append(entry)
                continue
            enough = min(run.level, entry.highest)
            if not any(settles(finding, entry, enough) for finding in findings):
                found.append(entry)
        return self.in_order(found)

    def in_order(self, entries: list[Entry]) -> list[Entry]:
        """Dependencies before dependents."""
        chosen, done, out = {e.id: e for e in entries}, set[str](), list[Entry]()

        def visit(id: str) -> None:
            stack = [(id, False)]
            while stack:
                name, ready = stack.pop()
                if ready:
                    if name in chosen:
                        out.append(chosen[name])
                elif name not in done:
                    done.add(name)
                    stack.append((name, True))
                    known = self.tree.entries.get(name)
                    stack += [
                        (d, False)
                        for d in reversed(known.depends_on if known else ())
                        if d not in done
                    ]

        for entry in entries:
            visit(entry.id)
        return out

    def judge(
        self, entries: Sequence[Entry], run: Run, jobs: int = 1
    ) -> Iterator[tuple[Entry, ClaimRecord]]:
        """A record per claim, as each is reached; evidence is written when a contract is done."""
        deadline = time.monotonic() + run.seconds
        entries = [
            entry for entry in entries if self.has_digest(entry, run)
        ]  # of the others, status says why
        if jobs > 1 and len(entries) > 1:
            yield from self._judge_apart(entries, run, jobs, deadline)
            return
        for entry in entries:
            records, reached = [], self._reach(entry, run)
            for record in reached.during(judge_file(entry.path, run, deadline)):
                records.append(record)
                yield entry, record
            self._keep(entry, run, Judged(tuple(records), reached.files(), engine_in_use()))

    def _reach(self, entry: Entry, run: Run) -> Reach:
        return Reach(self.home.parent, self.home, self.tree.files_of(entry.id, key_of(run)))

    def has_digest(self, entry: Entry, run: Run) -> bool:
        """Not if something it rests on is missing or rests on it."""
        try:
            return bool(self.tree.digest(entry.id, key_of(run)))
        except ContractError:
            return False

    def _judge_apart(
        self, entries: Sequence[Entry], run: Run, jobs: int, deadline: float
    ) -> Iterator[tuple[Entry, ClaimRecord]]:
        # Spawned: torch's threads do not survive a fork.
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            left = deadline - time.monotonic()
            tasks = {
                pool.submit(judge_whole, e.path, run, left, self._reach(e, run)): e for e in entries
            }
            for task in as_completed(tasks):
                entry = tasks[task]
                judged = task.result()
                self._keep(entry, run, judged)
                for record in judged.records:
                    yield entry, record

    def _keep(self, entry: Entry, run: Run, judged: Judged) -> None:
        reached = tuple(
            record for record in judged.records if not record.detail.startswith("not reached")
        )
        if len(reached) < len(judged.records) and not any(
            record.verdict in ladder.RED for record in reached
        ):
            return  # cut short by --seconds, and nothing was settled
        digest, asked = self.tree.digest(entry.id, key_of(run)), min(run.level, entry.highest)
        found = Finding(
            entry.id,
            digest,
            run.subject,
            asked,
            reached,
            engine=judged.engine,
            reached=judged.files,
        )
        self.evidence.write(found)


def settles(finding: Finding, entry: Entry, enough: int) -> bool:
    """Whether judging again could say more: not after red, nor after every claim ran as far as is asked."""
    if any(record.verdict in ladder.RED for record in finding.records):
        return True
    return finding.ran and len(finding.records) == entry.claims and finding.asked >= enough


def key_of(run: Run) -> str:
    """What distinguishes evidence beyond the contract: another subject, or thorough sizes."""
    return run.subject + (THOROUGH if run.thorough else "")


def judge_file(path: str, run: Run, deadline: float) -> Iterator[ClaimRecord]:
    """Imports torch only now."""
    from isobit.contracts.judge.verify import Options, verify_contract

    file = "" if library() in Path(path).resolve().parents else path
    options = Options(run.trusted, run.level, run.thorough, run.subject, deadline, file=file)
    yield from verify_contract(load_contract(Path(path)), options)


def judge_whole(path: str, run: Run, seconds: float, reached: Reach) -> Judged:
    """In another process."""
    records = tuple(reached.during(judge_file(path, run, time.monotonic() + seconds)))
    return Judged(records, reached.files(), engine_in_use())


def engine_in_use() -> str:
    """The engine that runs bf16 here, and torch's instruction set, asked of the libraries that were just used."""
    import torch

    from isobit import native

    return f"bf16 {'amx' if native.pairs_bf16() else 'chain'}, torch {torch.backends.cpu.get_cpu_capability()}"


def verdict_at(status: ContractStatus, level: int) -> str:
    """Kept, if every claim is kept as far as was asked, and so is what it rests on."""
    if status.verdict == "below-level" and status.claims and not status.weak:
        reached = all(
            c.verdict == "kept" and c.level >= min(c.required, level) for c in status.claims
        )
        return "kept" if reached else status.verdict
    return status.verdict
