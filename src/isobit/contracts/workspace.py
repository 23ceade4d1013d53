"""Contracts with their evidence: the status of each, which must be judged again, and judging them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from isobit.contracts.judge.run import judge_entries
from isobit.contracts.options import THOROUGH, Options
from isobit.contracts.store import ladder
from isobit.contracts.store.evidence import Evidence, JudgedContract, merge_records
from isobit.contracts.store.shipped import ShippedEvidence
from isobit.contracts.store.sources import INTERPRET, engine_variables, machine
from isobit.contracts.store.tree import HOME, Entry, Tree
from isobit.errors import ContractError, IsobitError, in_one_line
from isobit.foundation.engines import LOCAL
from isobit.foundation.records import ClaimRecord, ContractStatus, Shipped

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

NO_EVIDENCE = "no evidence at its present digest"


class Workspace:
    """The contracts below some folders, and the evidence about them in `home`."""

    def __init__(self, folders: Sequence[Path], home: Path | None = None) -> None:
        self.folders = tuple(folders)
        first = folders[0] if folders else Path()
        self.home = home or (first if first.is_dir() else first.parent) / HOME
        self.tree = self.open_tree()
        self.evidence = Evidence(self.home)
        self.shipped = ShippedEvidence(self.tree)

    def open_tree(self, cached: bool = True) -> Tree:
        """Read the contracts."""
        return Tree(self.folders, self.home, cached)

    def choose(
        self, ids: Sequence[str], subject: str = "", shard: tuple[int, int] = (1, 1)
    ) -> list[Entry]:
        """Select contracts by id, or all; those that know a subject's name; one shard of n by a hash of the id."""
        entries = [self.tree.find(id) for id in (ids or self.tree.chosen)]
        if subject and ":" not in subject:
            entries = [e for e in entries if subject in e.subjects]
        index, count = shard
        return [
            e
            for e in entries
            if int(blake3(e.id.encode()).hexdigest()[:8], 16) % count == index - 1
        ]

    def _shipped_status(self, entry: Entry, variant: str) -> Shipped | None:
        """Return what the wheel says of a contract; with required keys, only if one of them signed it."""
        keys = self.evidence.keys
        if variant or (keys and not any(map(self.shipped.is_signed_by, keys))):
            return None
        return self.shipped.status_of(entry)

    def require(self, keys: Sequence[Ed25519PublicKey]) -> None:
        """Count only evidence that one of the keys signed, and ignore caches that may have come with it."""
        self.evidence.keys = tuple(keys)
        self.tree = self.open_tree(cached=False)

    def status(self, entry: Entry, variant: str = "", claims: bool = False) -> ContractStatus:
        """Return the status by evidence at the present digest; with `claims`, with each claim's record."""
        subject = variant.removesuffix(THOROUGH)
        status = ContractStatus(
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
            subject=entry.subjects.get(subject, subject) or entry.subject,
        )
        try:
            digest = self.tree.digest(entry.id, variant)
        except IsobitError as error:
            return replace(status, verdict="could-not-run", detail=in_one_line(error))
        status = replace(status, digest=digest)
        outline = entry.outline()
        findings = self.evidence.read(digest, outline)
        if not findings:
            verdict, why = self._without_evidence(entry, variant, digest)
            return replace(
                status, verdict=verdict, detail=why, shipped=self._shipped_status(entry, variant)
            )
        records: Sequence[ClaimRecord] = merge_records(findings)
        if entry.waivers or (claims and any(r.verdict == "broken" for r in records)):
            contract = self.tree.load(entry.id)
            told = [ladder.with_causes(contract, r) for r in records]
            records = [ladder.waive(contract, r) for r in told]
        verdict = ladder.contract_verdict(outline, records)
        level = ladder.contract_level(outline, records)
        detail = ""
        if verdict == "below-level":
            detail = f"kept up to L{level}, must reach L{entry.required}"
        shown = tuple(records) if claims else ()
        return replace(status, verdict=verdict, level=level, detail=detail, claims=shown)

    def _without_evidence(self, entry: Entry, variant: str, digest: str) -> tuple[str, str]:
        """Return the verdict of a contract that has no evidence, and the reason."""
        if not entry.claims:
            reasons = ["it has no claim"]
        elif entry.unlinked:
            reasons = [NO_EVIDENCE]
        else:
            elsewhere = self._elsewhere(entry, variant)
            reasons = [self.evidence.why_not(digest), elsewhere and f"evidence exists {elsewhere}"]
            return "not-judged", "; ".join(filter(None, reasons)) or NO_EVIDENCE
        if entry.unlinked:
            reasons.append(f"obligations without a claim: {', '.join(entry.unlinked)}")
        return "unbound", "; ".join(reasons)

    def _elsewhere(self, entry: Entry, variant: str) -> str:
        """Return the setting of this machine under which there is evidence: `under A=1`, `without A=1`."""
        here = engine_variables()
        others = [
            ({k: v for k, v in here.items() if k != name}, f"without {name}={here[name]}")
            for name in here
        ]
        if INTERPRET not in here:
            others.append(({**here, INTERPRET: "1"}, f"under {INTERPRET}=1"))
        for variables, words in others:
            if self.evidence.has(self.tree.digest(entry.id, variant, machine(variables))):
                return words
        return ""

    def statuses(
        self, entries: Sequence[Entry], variant: str = "", claims: bool = False, level: int = 4
    ) -> list[ContractStatus]:
        """Return each status; a contract is not kept if one that it depends on is not kept up to `level`."""
        known: dict[str, ContractStatus] = {}
        chosen = {entry.id for entry in entries}
        for entry in self.with_dependencies(entries):
            own = variant if entry.id in chosen else ""
            status = self.status(entry, own, claims or level < 4)
            below = [known[d] for d in status.depends_on if d in known]
            weak = next((s for s in below if verdict_at(s, level) != "kept"), None)
            if weak:
                verdict = weak.verdict if weak.verdict in ladder.UNSETTLED else "could-not-run"
                status = replace(
                    status,
                    verdict=ladder.worst([status.verdict, verdict]),
                    level=0,
                    weak=weak.id,
                    detail=status.detail or f"depends on {weak.id}, which is {weak.verdict}",
                )
            known[entry.id] = status
        return [known[entry.id] for entry in entries]

    def matrix(self, entries: Sequence[Entry]) -> tuple[dict[str, dict[str, str]], int]:
        """Return verdict and level per contract and engine from evidence of all machines, and files that do not count.

        Evidence counts if it is of these sources: its digest is that of the contract on the machine it names.
        """
        found: dict[str, dict[str, str]] = {entry.id: {} for entry in entries}
        known = {entry.id: entry for entry in entries}
        others = 0
        by_engine: dict[tuple[str, str], list[JudgedContract]] = {}
        for digest, names in self.evidence.names().items():
            about = self.evidence.about(names[0])
            entry = known.get(about.get("contract", ""))
            on = about.get("machine", "")
            if entry is None or not on or self.tree.digest(entry.id, "", on) != digest:
                others += len(names)
                continue
            findings = self.evidence.read(digest, entry.outline())
            others += len(names) - len(findings)
            for finding in findings:
                by_engine.setdefault((entry.id, finding.engine), []).append(finding)
        for (name, engine), findings in sorted(by_engine.items()):
            outline, records = known[name].outline(), merge_records(findings)
            verdict = ladder.contract_verdict(outline, records)
            found[name][engine] = f"{verdict} L{ladder.contract_level(outline, records)}"
        return found, others

    def with_dependencies(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return contracts and everything that they depend on, dependencies first."""
        names = {entry.id: entry for entry in entries}
        queue = list(entries)
        while queue:
            for name in queue.pop().depends_on:
                known = self.tree.entries.get(name)
                if known is not None and name not in names:
                    names[name] = known
                    queue.append(known)
        return self.in_order(list(names.values()))

    def stale(self, entries: Iterable[Entry], options: Options) -> list[Entry]:
        """Return contracts without evidence at their digest and at the level to judge, dependencies first."""
        found = []
        for entry in entries:
            try:
                digest = self.tree.digest(entry.id, options.variant)
                findings = self.evidence.read(digest, entry.outline())
            except ContractError:
                found.append(entry)
                continue
            level = min(options.level, entry.highest)
            if not any(settles(finding, entry, level) for finding in findings):
                found.append(entry)
        return self.in_order(found)

    def in_order(self, entries: list[Entry]) -> list[Entry]:
        """Sort contracts, dependencies before dependents."""
        chosen, done, out = {e.id: e for e in entries}, set[str](), list[Entry]()
        stack = [(entry.id, False) for entry in reversed(entries)]
        while stack:
            name, ready = stack.pop()
            if ready:
                out += [chosen[name]] if name in chosen else []
            elif name not in done:
                done.add(name)
                stack.append((name, True))
                known = self.tree.entries.get(name)
                below = known.depends_on if known else ()
                stack += [(d, False) for d in reversed(below) if d not in done]
        return out

    def judge(
        self, entries: Sequence[Entry], options: Options, jobs: int = 1, on: str = LOCAL
    ) -> Iterator[tuple[Entry, ClaimRecord]]:
        """Judge contracts and yield a record per claim; evidence is written after each contract."""
        return judge_entries(self.tree, self.evidence, entries, options, jobs, on)


def settles(finding: JudgedContract, entry: Entry, level: int) -> bool:
    """Return whether judging again could find nothing new: a claim is red, or all ran up to `level`."""
    if any(record.verdict in ladder.RED for record in finding.records):
        return True
    return finding.ran and len(finding.records) == entry.claims and finding.asked >= level


def verdict_at(status: ContractStatus, level: int) -> str:
    """Return the verdict if only levels up to `level` are required."""
    if status.verdict == "below-level" and status.claims and not status.weak:
        reached = all(
            c.verdict == "kept" and c.level >= min(c.required, level) for c in status.claims
        )
        return "kept" if reached else status.verdict
    return status.verdict
