"""Semantics that both sides declare: sequences, ids, positions, masks, policies and supports."""

from __future__ import annotations

from isobit.bits import equal
from isobit.comparing.rollouts.records import Finding
from isobit.comparing.rollouts.sides import Scored, Sequence

Pairs = list[tuple[Sequence, Sequence]]


def pair_sequences(rollout: Scored, trainer: Scored) -> tuple[Pairs, list[Finding]]:
    """Return the sequences that both have, by id, and what is missing or doubled."""
    by_id = {one.id: one for one in trainer.sequences}
    pairs = [(one, by_id[one.id]) for one in rollout.sequences if one.id in by_id]
    ids = {one.id for one in rollout.sequences}
    alone = sorted(ids ^ by_id.keys())
    sizes = len(rollout.sequences), len(trainer.sequences)
    doubled = sizes[0] - len(ids) + sizes[1] - len(by_id)
    if not alone and not doubled:
        return pairs, []
    detail = f"{sizes[0]} in the rollout and {sizes[1]} in the trainer; {doubled} ids twice"
    count = len(alone) + doubled
    first = f"sequence {alone[0]!r} is on one side only" if alone else ""
    return pairs, [Finding("semantics", "sequences", detail, count, sum(sizes), first)]


def compare_declared(pairs: Pairs) -> list[Finding]:
    """Return what differs before any log-probability is looked at."""
    found = [
        collect("prompt", pairs, lambda a, b: first_difference(a.prompt, b.prompt, "prompt token")),
        compare_tokens(pairs),
        collect("positions", pairs, positions_differ),
        collect("mask", pairs, masks_differ),
        *(policy_finding(pairs, name) for name in ("temperature", "top_k", "top_p")),
        policy_finding(pairs, "normaliser"),
        policy_finding(pairs, "processors"),
        compare_supports(pairs),
    ]
    return [one for one in found if one is not None]


def collect(kind: str, pairs: Pairs, differs: object) -> Finding | None:
    """Return a finding of all pairs in which `differs` says something, with the first."""
    assert callable(differs)
    said = [(a.id, differs(a, b)) for a, b in pairs]
    wrong = [(name, words) for name, words in said if words]
    if not wrong:
        return None
    first = f"sequence {wrong[0][0]!r}: {wrong[0][1]}"
    detail = f"{kind} differs in {len(wrong)} of {len(pairs)} sequences"
    return Finding("semantics", kind, detail, len(wrong), len(pairs), first)


def first_difference(a: tuple[int, ...], b: tuple[int, ...], what: str) -> str:
    """Return where two tuples differ first; "" if nowhere."""
    if a == b:
        return ""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return f"{len(a)} and {len(b)} of {what}"
    return f"{what} {at}: {a[at]} and {b[at]}"


def compare_tokens(pairs: Pairs) -> Finding | None:
    """Return how completions differ: shifted by one, by the rule for ties, or otherwise."""
    wrong = [(a, b) for a, b in pairs if a.tokens != b.tokens]
    if not wrong:
        return None
    if all(is_shifted(a.tokens, b.tokens) for a, b in wrong):
        kind = "shift"
    elif all(parts_at_a_tie(a, b) for a, b in wrong):
        kind = "tie rule"
    else:
        kind = "ids"
    a, b = wrong[0]
    first = f"sequence {a.id!r}: {first_difference(a.tokens, b.tokens, 'token')}"
    detail = {
        "shift": "the trainer's tokens are the rollout's, shifted by one",
        "tie rule": "tokens differ where both have the same log-probability in the row: another tie was taken",
        "ids": "completions have other token ids",
    }[kind]
    return Finding("semantics", kind, detail, len(wrong), len(pairs), first)


def is_shifted(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether one is the other without its first token."""
    shorter = min(len(a), len(b)) - 1
    if shorter < 2 or len(set(a)) < 2:
        return False
    return a[1 : 1 + shorter] == b[:shorter] or b[1 : 1 + shorter] == a[:shorter]


def parts_at_a_tie(a: Sequence, b: Sequence) -> bool:
    """Return whether the first tokens that differ have the same log p in a row that both have."""
    at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
    if at is None or a.rows is None or b.rows is None:
        return False
    row = a.rows[at]
    same_row = equal(row, b.rows[at])
    return same_row and float(row[a.tokens[at]]) == float(row[b.tokens[at]])


def positions_differ(a: Sequence, b: Sequence) -> str:
    """Return the first position that differs; "" if equal, or if a side has none."""
    if a.positions is None or b.positions is None:
        return ""
    return first_difference(a.positions, b.positions, "position of token")


def masks_differ(a: Sequence, b: Sequence) -> str:
    """Return how many tokens only one side counts."""
    if len(a.tokens) != len(b.tokens):
        return ""
    apart = a.counts != b.counts
    if not bool(apart.any()):
        return ""
    at = int(apart.nonzero()[0])
    side = "rollout" if bool(a.counts[at]) else "trainer"
    return f"{int(apart.sum())} tokens count on one side only; token {at} only in the {side}"


def policy_finding(pairs: Pairs, name: str) -> Finding | None:
    """Return where both sides declare another policy; what one leaves open is not compared."""
    kind = {"top_k": "truncation", "top_p": "truncation"}.get(name, name)

    def differs(a: Sequence, b: Sequence) -> str:
        mine, theirs = (settled(getattr(side.policy, name), name) for side in (a, b))
        if mine is None or theirs is None or mine == theirs:
            return ""
        return f"{name} {mine} and {theirs}"

    found = collect(kind, pairs, differs)
    if found is None:
        return None
    detail = f"{name} differs in {found.differ} of {found.of} sequences"
    return Finding("semantics", kind, detail, found.differ, found.of, found.first)


def settled(value: object, name: str) -> object:
    """Return a declared value; all ways to say "no truncation" are one."""
    if name == "top_k" and isinstance(value, int):
        return value if value > 0 else 0
    return value


def compare_supports(pairs: Pairs) -> Finding | None:
    """Return where the ids that were kept differ, or only one side was normalised over them."""
    one_sided = [
        (a, b)
        for a, b in pairs
        if (a.support is None) != (b.support is None) and len(a.tokens) == len(b.tokens)
    ]
    if one_sided:
        a, b = one_sided[0]
        side, other = ("rollout", "trainer") if b.support is None else ("trainer", "rollout")
        detail = f"the {side} is normalised over kept ids, the {other} over the whole vocabulary"
        return Finding(
            "semantics", "truncation", detail, len(one_sided), len(pairs), f"sequence {a.id!r}"
        )
    wrong = [
        (a, b, at)
        for a, b in pairs
        for at, (x, y) in enumerate(zip(a.support or (), b.support or (), strict=False))
        if set(x) != set(y)
    ]
    if not wrong:
        return None
    tie = all(supports_part_at_a_tie(*one) for one in wrong)
    total = sum(len(a.support or ()) for a, _ in pairs)
    a, b, at = wrong[0]
    mine, theirs = set((a.support or ())[at]), set((b.support or ())[at])
    first = f"sequence {a.id!r}, token {at}: {sorted(mine - theirs)[:4]} and {sorted(theirs - mine)[:4]}"
    detail = "kept ids differ" + (" only among ids of the same log-probability" if tie else "")
    return Finding(
        "semantics", "tie rule" if tie else "truncation", detail, len(wrong), total, first
    )


def supports_part_at_a_tie(a: Sequence, b: Sequence, at: int) -> bool:
    """Return whether two supports of one size differ only in ids that are equally likely."""
    rows = a.rows if a.rows is not None else b.rows
    mine, theirs = set((a.support or ())[at]), set((b.support or ())[at])
    if rows is None or len(mine) != len(theirs):
        return False
    values = {float(rows[at][token]) for token in mine ^ theirs}
    return len(values) == 1
