"""What texts beside the dumps state: lines of NCCL's watchdog, and stacks that py-spy printed.

Only what a text says is repeated, with the rank that it names. Nothing is concluded from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from isobit.foundation.majority import name_ranks
from isobit.foundation.plain_text import one_line

MOST_FACTS = 10_000
TIMEOUT = re.compile(
    r"Rank (?P<rank>\d{1,7})\b.{0,200}?Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(?P<number>\d{1,19}), OpType=(?P<op>\w{1,40})"
    r"(?:.{0,300}? ran for (?P<ran>\d{1,19}) milliseconds)?"
)
STATUS = re.compile(
    r"Rank (?P<rank>\d{1,7})\b.{0,400}?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,19}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,19})"
)
THREAD = re.compile(r'^Thread (?:0x)?[\da-fA-F]+ \((?P<state>[^)]{1,40})\)(?:: "(?P<name>[^"]*)")?')
FRAME = re.compile(r"^\s+(?P<name>\S.{0,200}?) \((?P<file>[^()]{1,1000}):(?P<line>\d{1,9})\)")
IN_NAME = re.compile(r"rank[_\-.]?(\d{1,7})|(\d{1,7})(?:\.\w+)*$")


@dataclass
class Facts:
    """What texts state.

    Attributes:
        timeouts: (operation, number in its group) -> {rank: milliseconds}.
        statuses: (last enqueued, last completed) -> ranks.
        stacks: By rank, the stack of its main thread, innermost first.
    """

    timeouts: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    statuses: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a sentence for each fact that some rank's log states."""
        said = [
            f"NCCL's watchdog: {op} number {number} timed out on {name_ranks(ranks)}"
            + (f" after {max(ranks.values()) / 1e3:g} s" if max(ranks.values()) else "")
            for (op, number), ranks in self.timeouts.items()
        ]
        return said + [
            f"NCCL's watchdog: last enqueued {enqueued}, last completed {completed} on {name_ranks(ranks)}"
            for (enqueued, completed), ranks in self.statuses.items()
        ]


def read_text(data: bytes, name: str, facts: Facts) -> bool:
    """Add what a text states; False if it is no log of NCCL and no output of py-spy."""
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return False
    if any(THREAD.match(line) for line in lines) and any(FRAME.match(line) for line in lines):
        return read_stacks(lines, name, facts)
    found = False
    for line in lines:
        timeout, status = TIMEOUT.search(line[:4000]), STATUS.search(line[:4000])
        if timeout and len(facts.timeouts) < MOST_FACTS:
            key = (timeout["op"], int(timeout["number"]))
            facts.timeouts.setdefault(key, {})[int(timeout["rank"])] = int(timeout["ran"] or 0)
            found = True
        if status and len(facts.statuses) < MOST_FACTS:
            pair = (int(status["enqueued"]), int(status["completed"]))
            facts.statuses.setdefault(pair, set()).add(int(status["rank"]))
            found = True
    return found


def read_stacks(lines: list[str], name: str, facts: Facts) -> bool:
    """Keep the stack of the main thread; the file's name must have the rank."""
    rank = IN_NAME.search(name)
    if rank is None:
        return False
    stacks: dict[str, list[str]] = {}
    thread = ""
    for line in lines:
        header, frame = THREAD.match(line), FRAME.match(line)
        if header:
            thread = header["name"] or f"thread {len(stacks)}"
            stacks.setdefault(thread, [])
        elif frame and thread:
            place = f"{frame['file']}:{frame['line']} in {frame['name']}"
            stacks[thread].append(one_line(place))
    main = stacks.get("MainThread") or next(iter(stacks.values()), [])
    if main:
        facts.stacks[int(rank[1] or rank[2])] = tuple(main)
    return bool(main)
