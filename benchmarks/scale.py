"""A cost model of all-reduce on 8 to 16,384 ranks: time, messages and memory of each algorithm. Nothing is run."""

from dataclasses import dataclass
from math import log2, prod

HOST, HOSTS = 8, 8  # ranks of a host, hosts of a rack
INSIDE, ACROSS = 3e-6, 10e-6  # seconds that a message takes, however short
INSIDE_RATE, ACROSS_RATE = (
    300e9,
    50e9,
)  # bytes a second of one rank, each way: its link inside, its own adapter outside
POST = 1e-6  # seconds of a rank's processor for each message it posts
MEMORY_RATE = 2e12  # bytes a second; an addition reads two and writes one
RANKS = (8, 64, 512, 4096, 16384)
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Of one rank, for one all-reduce."""

    seconds: float
    messages: float  # that it sends
    smallest: float  # bytes of the smallest message
    memory: float  # bytes beside the tensor


def adding(n, p):
    return 3 * n * (p - 1) / p / MEMORY_RATE


def ring(n, p):
    """2(P−1) steps of n/P; as many rings as adapters, so that each carries its share of the host's traffic."""
    hosts = p // HOST
    latency = 2 * (p - 1) * (INSIDE if hosts == 1 else ((HOST - 1) * INSIDE + ACROSS) / HOST)
    bytes_time = (
        2 * n * (p - 1) / p / (INSIDE_RATE if hosts == 1 else min(HOST * ACROSS_RATE, INSIDE_RATE))
    )
    return Cost(latency + bytes_time + adding(n, p), 2 * (p - 1), n / p, n / p)


def double_tree(n, p):
    """A chain inside the host and two binary trees across: logarithmic, and pipelined at the rate of the ring."""
    hosts = p // HOST
    latency = (
        2 * (HOST - 1) * INSIDE + 2 * log2(hosts) * ACROSS if hosts > 1 else 2 * (HOST - 1) * INSIDE
    )
    bytes_time = 2 * n / (INSIDE_RATE if hosts == 1 else min(HOST * ACROSS_RATE, INSIDE_RATE))
    pieces = max(n / (512 * 1024), 1)
    return Cost(latency + bytes_time + adding(n, p), 2 * pieces, min(n, 512 * 1024), 2 * MEGABYTE)


def flat_collectives(n, p):
    """All-to-all, local tree, all-gather: a message to every rank, most of them across."""
    inside, across = min(p, HOST) - 1, max(p - HOST, 0)
    half = (
        max(inside * n / p / INSIDE_RATE, across * n / p / ACROSS_RATE)
        + (p - 1) * POST
        + (ACROSS if across else INSIDE)
    )
    return Cost(2 * half + adding(n, p), 2 * (p - 1), n / p, min(2 * 16 * MEGABYTE, n))


def messages(shape, halving=False):
    """Return how many messages a rank sends in an all-reduce over levels of these sizes; a flat group is one."""
    return sum(2 * (log2(size) if halving else size - 1) for size in shape)


def levels(n, shape):
    """Collectives inside the host, and across on the share that a rank then owns: [Note: levels] in parallel."""
    seconds, owned = adding(n, prod(shape)), n
    for level, size in enumerate(reversed(shape)):
        alpha, rate = (ACROSS, ACROSS_RATE) if level else (INSIDE, INSIDE_RATE)
        seconds += 2 * ((size - 1) * (owned / size / rate + POST) + (alpha if size > 1 else 0))
        owned /= size
    return Cost(seconds, messages(shape), owned, n + 2 * n / HOST)


def two_levels(n, p):
    return levels(n, (p // HOST, HOST))


def three_levels(n, p):
    """Racks of up to eight hosts; between racks the same links as between hosts."""
    hosts = p // HOST
    inside = min(hosts, HOSTS)
    return levels(n, (hosts // inside, inside, HOST))


def recursive_halving(n, p):
    """Model recursive halving, nearest rank first: three rounds inside a host of eight."""
    seconds = adding(n, p)
    for step in range(int(log2(p))):
        near = 2**step < HOST
        size = n / 2 ** (step + 1)
        seconds += 2 * (
            size / (INSIDE_RATE if near else ACROSS_RATE) + (INSIDE if near else ACROSS) + POST
        )
    return Cost(seconds, 2 * log2(p), n / p, min(12 * MEGABYTE, n / 2))


ALGORITHMS = {
    "ring": ring,
    "double tree": double_tree,
    "ours, flat, collectives": flat_collectives,
    "ours, two levels": two_levels,
    "ours, three levels": three_levels,
    "ours, recursive halving": recursive_halving,
}


def table(n):
    """Milliseconds by ranks, as Markdown."""
    lines = ["| ranks | " + " | ".join(ALGORITHMS) + " |", "| --- |" + " --- |" * len(ALGORITHMS)]
    for p in RANKS:
        cells = [f"{cost(n, p).seconds * 1e3:.3f}" for cost in ALGORITHMS.values()]
        lines.append(f"| {p:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sizes(n, p):
    """Messages, the smallest of them and memory, as Markdown."""
    lines = [
        f"| at {p:,} ranks | messages a rank sends | smallest, bytes | memory beside the tensor, MB |",
        "| --- | --- | --- | --- |",
    ]
    for name, cost in ALGORITHMS.items():
        found = cost(n, p)
        lines.append(
            f"| {name} | {found.messages:,.0f} | {found.smallest:,.0f} | {found.memory / MEGABYTE:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(25 * MEGABYTE), table(64 << 10), sizes(25 * MEGABYTE, 16384), sep="\n\n")
