"""Judge several contracts, in this process or in several, and write the evidence of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, replace

from isobit.contracts.language.contract import Contract
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.contracts.store.evidence import Evidence, JudgedContract
from isobit.contracts.store.opened_files import OpenedFiles
from isobit.contracts.store.sources import machine
from isobit.contracts.store.tree import Entry, Tree
from isobit.errors import ArgumentError, ContractError
from isobit.foundation.engines import LOCAL, open_engine
from isobit.foundation.records import ClaimRecord

NO_LAUNCH = "the subject launches no kernel on the backend"


@dataclass(frozen=True)
class Judged:
    """The records of one contract, the files that its code opened, the engine that ran, and its machine."""

    records: tuple[ClaimRecord, ...]
    files: tuple[tuple[str, str], ...]
    engine: str
    machine: str


def judge_entries(
    tree: Tree,
    evidence: Evidence,
    entries: Sequence[Entry],
    options: Options,
    jobs: int = 1,
    on: str = LOCAL,
) -> Iterator[tuple[Entry, ClaimRecord]]:
    """Judge contracts and yield a record per claim; evidence is written after each contract.

    With `on` they are tasks of that engine: each worker judges for its own machine, and the driver writes.

    Contracts that have no digest, because a dependency is missing or circular, are left out.
    """
    refuse_processes(jobs if on == LOCAL else 2, f"--jobs {jobs}" if on == LOCAL else f"--on {on}")
    deadline = time.monotonic() + options.seconds
    entries = [entry for entry in entries if has_digest(tree, entry, options)]
    if on != LOCAL or (jobs > 1 and len(entries) > 1):
        with open_engine(on, jobs) as pool:
            yield from _judge_in_processes(tree, evidence, entries, options, pool, deadline)
        return
    for entry in entries:
        records, opened = [], _opened_files(tree, entry, options)
        for record in opened.during(judge_contract(tree.load(entry.id), options, deadline)):
            records.append(record)
            yield entry, record
        judged = Judged(tuple(records), opened.files(), engine_in_use(), machine())
        _write(tree, evidence, entry, options, judged)


def refuse_processes(jobs: int, said: str = "") -> None:
    """Raise for several processes while a backend is chosen: it is chosen in this process alone."""
    if jobs == 1 or "torch" not in sys.modules:
        return  # whoever chooses a backend has imported torch
    from isobit.foundation import backends

    if backends.chosen() is not None:
        raise ArgumentError(
            expected="one process for a backend",
            received=said or f"--jobs {jobs}",
            remedy="leave --jobs and --on out; --shard I/N splits the contracts over several commands",
        )


def has_digest(tree: Tree, entry: Entry, options: Options) -> bool:
    """Return whether every dependency of a contract is known and none is circular."""
    try:
        return bool(tree.digest(entry.id, options.variant))
    except ContractError:
        return False


def judge_contract(
    contract: Contract, options: Options, deadline: float = float("inf")
) -> Iterator[ClaimRecord]:
    """Judge one contract. Torch is imported only when the first record is requested."""
    from isobit.contracts.judge.verify import verify_contract
    from isobit.foundation import backends

    records, backend = verify_contract(contract, options, deadline), backends.chosen()
    if backend is None:
        yield from records
        return
    serves = launches_kernels(contract, options)
    for record in records:
        if record.verdict == "kept" and not serves:
            record = replace(record, verdict="vacuous", level=1, detail=NO_LAUNCH)
        again = f"{record.replay} --backend {backend.kind} --target {backend.target}"
        yield replace(record, replay=again) if record.replay else record


def launches_kernels(contract: Contract, options: Options) -> bool:
    """Return whether the subject launches a kernel on the chosen backend; one that raises is left to the claims."""
    from isobit.contracts.judge.bound import find_subject
    from isobit.contracts.judge.recipes import Case, fixed_recipes
    from isobit.foundation.launches import record_launches

    name = contract.claims[0].inputs[0]
    case = Case(next(fixed_recipes(name, contract.inputs[name])), contract.inputs[name])
    with record_launches() as seen:
        try:
            find_subject(contract, options)(*case.arguments.values(), **case.options)
        except Exception:
            return True
    return any(launch.executor == "triton" for launch in seen)


def _opened_files(tree: Tree, entry: Entry, options: Options) -> OpenedFiles:
    known = tree.files_of(entry.id, options.variant)
    return OpenedFiles(tree.home.parent, tree.home, known)


def _judge_in_processes(
    tree: Tree,
    evidence: Evidence,
    entries: Sequence[Entry],
    options: Options,
    pool: Executor,
    deadline: float,
) -> Iterator[tuple[Entry, ClaimRecord]]:
    left = deadline - time.monotonic()
    tasks = {}
    for entry in entries:
        opened = _opened_files(tree, entry, options)
        tasks[pool.submit(_judge_all, tree.load(entry.id), options, left, opened)] = entry
    for task in as_completed(tasks):
        entry, judged = tasks[task], task.result()
        _write(tree, evidence, entry, options, judged)
        for record in judged.records:
            yield entry, record


def _judge_all(contract: Contract, options: Options, seconds: float, opened: OpenedFiles) -> Judged:
    """Judge a contract in a process of its own."""
    deadline = time.monotonic() + seconds
    records = tuple(opened.during(judge_contract(contract, options, deadline)))
    return Judged(records, opened.files(), engine_in_use(), machine())


def _write(tree: Tree, evidence: Evidence, entry: Entry, options: Options, judged: Judged) -> None:
    reached = tuple(r for r in judged.records if not r.detail.startswith("not reached"))
    cut_short = len(reached) < len(judged.records)
    if cut_short and not any(record.verdict in ladder.RED for record in reached):
        return  # --seconds ended it, and nothing was decided
    finding = JudgedContract(
        entry.id,
        tree.digest(
            entry.id, options.variant, judged.machine if judged.machine != machine() else ""
        ),
        options.subject,
        min(options.level, entry.highest),
        reached,
        machine=judged.machine,
        engine=judged.engine,
        reached=judged.files,
    )
    evidence.write(finding)


def engine_in_use() -> str:
    """Return the engine that runs bf16 here and torch's instruction set, as loaded in this process."""
    import torch

    from isobit.foundation import backends, native

    bf16 = "amx" if native.pairs_bf16() else "chain"
    cpu = f"bf16 {bf16}, torch {torch.backends.cpu.get_cpu_capability()}"
    backend = backends.chosen()
    if backend is None:
        return cpu
    return f"Triton by {backend.kind}, {backend.target}, products {backend.engine}; {cpu}"
