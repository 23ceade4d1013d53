"""Where threads that branch apart meet again: the immediate post-dominator of each branch.

Triton lets one warp issue the instructions of sm_100's tensor core: the other warps branch around them. The
machine runs both sides, one after the other, each with its threads, until the instruction that every path from
the branch to the end of the kernel passes first.
"""

from __future__ import annotations

import itertools

from isobit.certifying.ptx import Program, Symbol

EXIT = ("ret", "exit", "trap")


def successors(program: Program, index: int) -> list[int]:
    """Return the instructions that may follow one; the number of instructions stands for the end."""
    instruction, end = program.instructions[index], len(program.instructions)
    following = [] if instruction.guard is None else [index + 1]
    if instruction.parts[0] in EXIT:
        return [*following, end]
    if instruction.parts[0] == "bra":
        target = instruction.operands[0]
        assert isinstance(target, Symbol)
        return [*following, program.labels[target.name]]
    return [index + 1]


def meeting_points(program: Program) -> dict[int, int]:
    """Return for each guarded branch the instruction where its two sides meet.

    The method is that of Cooper, Harvey and Kennedy ("A Simple, Fast Dominance Algorithm") on the reversed
    graph of blocks: straight lines of instructions are one block.
    """
    end = len(program.instructions)
    starts = {0, end, *program.labels.values()}
    for index, instruction in enumerate(program.instructions):
        if instruction.parts[0] in ("bra", *EXIT):
            starts.add(index + 1)
    firsts = sorted(starts)
    last_of = {a: b - 1 for a, b in itertools.pairwise(firsts)}
    edges = {first: successors(program, last) for first, last in last_of.items()}
    order = _postorder_to(end, edges)
    rank = {block: i for i, block in enumerate(order)}
    after: dict[int, int] = {end: end}
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [each for each in edges[block] if each in after]
            meet = known[0]
            for each in known[1:]:
                meet = _common(meet, each, after, rank)
            if after.get(block) != meet:
                after[block], changed = meet, True
    return {
        last: after[first]
        for first, last in last_of.items()
        if first in after and len(edges[first]) > 1
    }


def _common(a: int, b: int, after: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = after[a]
        while rank[b] < rank[a]:
            b = after[b]
    return a


def _postorder_to(end: int, edges: dict[int, list[int]]) -> list[int]:
    """Return the blocks that reach the end, in postorder of a walk against the edges."""
    before: dict[int, list[int]] = {}
    for block, following in edges.items():
        for each in following:
            before.setdefault(each, []).append(block)
    order, seen = [], {end}
    stack = [(end, iter(before.get(end, ())))]
    while stack:
        block, rest = stack[-1]
        for each in rest:
            if each not in seen:
                seen.add(each)
                stack.append((each, iter(before.get(each, ()))))
                break
        else:
            order.append(block)
            stack.pop()
    return order
