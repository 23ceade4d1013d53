"""A tree of contracts with its evidence: where each stands, what has to be judged again, and the judging."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from blake3 import blake3

from isobit.contracts import ladder
from isobit.contracts.contract import Contract
from isobit.contracts.evidence import Evidence, Finding, merge_records
from isobit.contracts.load import load_contract
from isobit.contracts.tree import HOME, Entry, Tree, library
from isobit.errors import ContractError, IsobitError
from isobit.records import ClaimRecord, ContractStatus

THOROUGH = " thorough"  # no name of a subject holds a space


@dataclass(frozen=True)
class Run:
    """What one verification is asked to do; plain data, so that it can be sent to another process."""

    trusted: tuple[str, ...] = ()
    level: int = 4
    thorough: bool = False
    subject: str = ""
    seconds: float = float("inf")


class Workspace:
    """Contracts below some folders, and the evidence kept beside them."""

    def __init__(self, folders: Sequence[Path], home: Path | None = None) -> None:
        first = folders[0] if folders else Path()
        self.home = home or (first if first.is_dir() else first.parent) / HOME
        self.tree = Tree(folders, self.home)
        self.evidence = Evidence(self.home)

    def choose(self, ids: Sequence[str], subject: str = "", shard: tuple[int, int] = (1, 1)) -> list[Entry]:
        """By id, or all of the tree; with a named subject, those that know it; of a shard, by a hash of the id."""
        entries = [self.tree.find(id) for id in (ids or self.tree.chosen)]
        if subject and ":" not in subject:
            entries = [e for e in entries if subject in e.subjects]
        index, count = shard
        return [e for e in entries if int(blake3(e.id.encode()).hexdigest()[:8], 16) % count == index - 1]

    def status(self, entry: Entry, subject: str = "", claims: bool = False) -> ContractStatus:
        """From evidence at the present digest alone; with `claims`, each claim's record too."""

        named = subject.removesuffix(THOROUGH)

        def stands(
            verdict: str, level: int, digest: str, detail: str = "", records: Iterable[ClaimRecord] = ()
        ) -> ContractStatus:
            return ContractStatus(
                entry.id,
                entry.version,
                entry.title,
                entry.path,
                digest,
                verdict,
                level,
                entry.required,
                entry.depends_on,
                entry.obligations,
                tuple(records),
                detail,
                entry.subjects.get(named, named) or entry.subject,
            )

        try:
            digest = self.tree.digest(entry.id, subject)
        except IsobitError as error:
            return stands("could-not-run", 0, "", str(error))
        if not claims:
            headers = self.evidence.headers(digest)
            words = {str(h["verdict"]) for h in headers}
            if headers and not entry.waivers:
                red = sorted(words & set(ladder.RED), key=ladder.VERDICTS.index)
                best = max(headers, key=lambda h: (h["verdict"] == "kept", int(h["level"]), str(h["date"])))
                return stands(red[0] if red else str(best["verdict"]), 0 if red else int(best["level"]), digest)
        findings = self.evidence.read(digest)
        if not findings:
            changed = "no evidence at its present digest" if entry.claims else "nothing in it is executable"
            lacking = f"; not linked: {', '.join(entry.unlinked)}" if entry.unlinked else ""
            return stands(
                "unbound" if entry.unlinked or not entry.claims else "could-not-run", 0, digest, changed + lacking
            )
        contract = load_contract(Path(entry.path))
        records = [ladder.waive(contract, r) for r in merge_records(findings)]
        verdict, level = ladder.contract_verdict(contract, records), ladder.contract_level(contract, records)
        return stands(verdict, level, digest, records=records)

    def statuses(
        self, entries: Sequence[Entry], subject: str = "", claims: bool = False, level: int = 4
    ) -> list[ContractStatus]:
        """Of each; a contract that rests on one that is not kept, as far as `level`, is not kept either."""
        known: dict[str, ContractStatus] = {}
        chosen = {entry.id for entry in entries}
        for entry in self.with_dependencies(entries):
            own = subject if entry.id in chosen else ""
            status = self.status(entry, own, claims or level < 4)
            weak = [known[d] for d in status.depends_on if d in known and verdict_at(known[d], level) != "kept"]
            if weak:
                detail = f"rests on {weak[0].id}, which is {weak[0].verdict}"
                word = ladder.worst([status.verdict, "could-not-run"])
                status = replace(status, verdict=word, level=0, weak=weak[0].id, detail=status.detail or detail)
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
                headers = self.evidence.headers(self.tree.digest(entry.id, key_of(run)))
            except ContractError:
                found.append(entry)
                continue
            enough = min(run.level, entry.highest)
            settled = [h for h in headers if h["verdict"] in ladder.RED or (h.get("ran") and int(h["asked"]) >= enough)]
            if not settled:
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
                    stack += [(d, False) for d in reversed(known.depends_on if known else ()) if d not in done]

        for entry in entries:
            visit(entry.id)
        return out

    def judge(self, entries: Sequence[Entry], run: Run, jobs: int = 1) -> Iterator[tuple[Entry, ClaimRecord]]:
        """A record per claim, as each is reached; evidence is written when a contract is done."""
        deadline = time.monotonic() + run.seconds
        entries = [entry for entry in entries if self.has_digest(entry, run)]  # of the others, status says why
        if jobs > 1 and len(entries) > 1:
            yield from self._judge_apart(entries, run, jobs, deadline)
            return
        for entry in entries:
            records = []
            for record in judge_file(entry.path, run, deadline):
                records.append(record)
                yield entry, record
            self._keep(entry, run, records)

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
            tasks = {pool.submit(judge_whole, entry.path, run, left): entry for entry in entries}
            for task in as_completed(tasks):
                entry = tasks[task]
                records = task.result()
                self._keep(entry, run, records)
                for record in records:
                    yield entry, record

    def _keep(self, entry: Entry, run: Run, records: Sequence[ClaimRecord]) -> None:
        reached = [record for record in records if not record.detail.startswith("not reached")]
        if len(reached) < len(records) and not any(record.verdict in ladder.RED for record in reached):
            return  # cut short by --seconds, and nothing was settled
        records = reached
        contract: Contract = load_contract(Path(entry.path))
        verdict, level = ladder.contract_verdict(contract, records), ladder.contract_level(contract, records)
        digest = self.tree.digest(entry.id, key_of(run))
        asked = min(run.level, entry.highest)
        ran = all(record.verdict != "could-not-run" for record in records)
        self.evidence.write(Finding(entry.id, digest, run.subject, asked, level, verdict, tuple(records), ran=ran))


def key_of(run: Run) -> str:
    """What distinguishes evidence beyond the contract: another subject, or thorough sizes."""
    return run.subject + (THOROUGH if run.thorough else "")


def judge_file(path: str, run: Run, deadline: float) -> Iterator[ClaimRecord]:
    """Imports torch only now."""
    from isobit.contracts.verify import Options, verify_contract

    file = "" if library() in Path(path).resolve().parents else path
    options = Options(run.trusted, run.level, run.thorough, run.subject, deadline, file=file)
    yield from verify_contract(load_contract(Path(path)), options)


def judge_whole(path: str, run: Run, seconds: float) -> list[ClaimRecord]:
    """In another process."""
    return list(judge_file(path, run, time.monotonic() + seconds))


def verdict_at(status: ContractStatus, level: int) -> str:
    """Kept, if every claim is kept as far as was asked, and so is what it rests on."""
    if status.verdict == "could-not-run" and status.claims and not status.weak:
        reached = all(c.verdict == "kept" and c.level >= min(c.required, level) for c in status.claims)
        return "kept" if reached else status.verdict
    return status.verdict
