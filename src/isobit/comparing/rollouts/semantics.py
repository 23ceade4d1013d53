"""The semantics of two sides: what both declare, and what is inferred from values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from isobit.bits import equal
from isobit.comparing.rollouts.reading import Sequence
from isobit.comparing.rollouts.report import Finding

# Semantics that both sides declare: sequences, ids, positions, masks, policies and supports.

Pairs = list[tuple[Sequence, Sequence]]
OTHER_IDS = "completions have other token ids"


def compare_declared(pairs: Pairs) -> list[tuple[Finding | None, int]]:
    """Return what differs before any log-probability is looked at: a finding or None per check, and of how many."""
    count = len(pairs)
    found = [
        collect("prompt", pairs, lambda a, b: first_difference(a.prompt, b.prompt, "prompt token")),
        compare_tokens(pairs),
        collect("positions", pairs, positions_differ),
        collect("mask", pairs, masks_differ),
        *(policy_finding(pairs, name) for name in ("temperature", "top_k", "top_p")),
        policy_finding(pairs, "normaliser"),
        policy_finding(pairs, "processors"),
    ]
    supports = [compare_one_sided(pairs), compare_supports(pairs)]
    entries = sum(len(a.support or ()) for a, _ in pairs)
    return [*((one, count) for one in found), (supports[0], count), (supports[1], entries)]


def merge_findings(first: Finding | None, second: Finding | None, total: int) -> Finding | None:
    """Return one finding of one check over two parts of the data; `total` is how many both parts have."""
    if first is None or second is None:
        one = first or second
        return None if one is None else recount(one, one.differ, total)
    if first.kind != second.kind:  # a shift here and a tie there: the general kind
        general = next((one for one in (first, second) if one.kind in ("ids", "truncation")), None)
        kind, detail = ("ids", OTHER_IDS) if general is None else (general.kind, general.detail)
        first = replace(first, kind=kind, detail=detail)
    return recount(first, first.differ + second.differ, total)


def recount(one: Finding, differ: int, total: int) -> Finding:
    """Return a finding with other counts, also in its words."""
    words = one.detail.replace(f"{one.differ} of {one.of}", f"{differ} of {total}")
    return replace(one, detail=words, differ=differ, of=total)


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
        "ids": OTHER_IDS,
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


def compare_one_sided(pairs: Pairs) -> Finding | None:
    """Return where only one side was normalised over kept ids."""
    one_sided = [
        (a, b)
        for a, b in pairs
        if (a.support is None) != (b.support is None) and len(a.tokens) == len(b.tokens)
    ]
    if not one_sided:
        return None
    a, b = one_sided[0]
    side, other = ("rollout", "trainer") if b.support is None else ("trainer", "rollout")
    detail = f"the {side} is normalised over kept ids, the {other} over the whole vocabulary"
    return Finding(
        "semantics", "truncation", detail, len(one_sided), len(pairs), f"sequence {a.id!r}"
    )


def compare_supports(pairs: Pairs) -> Finding | None:
    """Return where the ids that were kept differ."""
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


# Semantics that nobody declared, inferred from values: shift, temperature, truncation and
# normaliser.
#
# [Note: what explains a difference] A hypothesis changes the log-probabilities of one side (scores
# them at another
# temperature, say). It explains the difference if what remains is at most a twentieth of what was
# there, in the mean and at the most, and below 1e-2. Numerics alone do not pass: their differences
# have no common cause.

SHARE, LARGEST = 0.05, 1e-2
LEAST_TOKENS = 4
USUAL = [("top_p", p) for p in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.98, 0.99)]
USUAL += [("top_k", float(k)) for k in (1, 2, 5, 10, 20, 40, 50, 64, 100, 128)]

Aligned = list[
    tuple[Sequence, Sequence, Tensor]
]  # (rollout, trainer, which tokens count on both sides)


def infer(aligned: Aligned) -> Finding | None:
    """Return the one reason that explains why log-probabilities differ, or None."""
    for look in (find_shift, find_unnormalised, find_temperature, find_truncation, find_constant):
        found = look(aligned)
        if found is not None:
            return found
    return None


def selected(aligned: Aligned) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of both sides, in fp64."""
    sides = [
        [one.logprobs.double()[counts] for one in pair if one.logprobs is not None]
        for *pair, counts in aligned
    ]
    mine, theirs = zip(*sides, strict=True)
    return torch.cat(mine), torch.cat(theirs)


def explains(changed: Tensor, target: Tensor, before: Tensor, largest: float = LARGEST) -> bool:
    """Return whether `changed` is much nearer to the target; see [Note: what explains a difference]."""
    rest, was = (changed - target).abs(), before.abs()
    if len(rest) < LEAST_TOKENS or not bool(rest.isfinite().all()) or float(was.max()) < 1e-6:
        return False
    near = float(rest.max()) <= SHARE * float(was.max()) and float(rest.max()) < largest
    return near and float(rest.mean()) <= SHARE * float(was.mean())


def name_rest(changed: Tensor, target: Tensor) -> str:
    """Return what remains after a hypothesis."""
    return f"what remains is at most {float((changed - target).abs().max()):.2g}"


# ---- hypotheses -------------------------------------------------------------------------------------------


def find_shift(aligned: Aligned) -> Finding | None:
    """Return a finding if one side's entry t is the other's entry t + 1."""
    for step in (1, -1):
        pieces = [shifted_pair(a, b, step) for a, b, _ in aligned if len(a.tokens) > 2]
        if not pieces:
            continue
        mine, theirs, plain = (torch.cat(x) for x in zip(*pieces, strict=True))
        if explains(mine, theirs, plain, largest=torch.inf):
            side = "behind" if step == 1 else "ahead of"
            detail = f"the trainer's log-probabilities are one token {side} the rollout's"
            return Finding(
                "semantics", "shift", f"{detail}; {name_rest(mine, theirs)}", len(plain), len(plain)
            )
    return None


def shifted_pair(a: Sequence, b: Sequence, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rollout's and the trainer's values one apart, and the difference without the shift."""
    assert a.logprobs is not None
    assert b.logprobs is not None
    mine, theirs = a.logprobs.double(), b.logprobs.double()
    plain = (mine - theirs)[1:]
    return (mine[:-1], theirs[1:], plain) if step == 1 else (mine[1:], theirs[:-1], plain)


def find_unnormalised(aligned: Aligned) -> Finding | None:
    """Return a finding if a side's values are logits: above 0, or explained by normalising its own rows."""
    mine, theirs = selected(aligned)
    for side, values, other in ((0, mine, theirs), (1, theirs, mine)):
        name = ("rollout", "trainer")[side]
        above = int((values > 1e-4).sum())
        if above and not int((other > 1e-4).sum()):
            detail = (
                f"{above} of {len(values)} values of the {name} are above 0: no log-probabilities"
            )
            return Finding("semantics", "normaliser", detail, above, len(values))
        rows, tokens = rows_of(aligned, side)
        if rows is None or len(rows) != len(values):
            continue
        normal = rows.log_softmax(-1).gather(1, tokens).squeeze(1)
        if explains(normal, other, mine - theirs) and not explains(values, other, mine - theirs):
            largest = float(rows.logsumexp(-1).abs().max())
            if largest > 1e-3:
                detail = f"rows of the {name} are not normalised (log Σ exp up to {largest:.3g})"
                return Finding("semantics", "normaliser", detail, len(values), len(values))
    return None


def rows_of(aligned: Aligned, side: int) -> tuple[Tensor | None, Tensor]:
    """Return a side's rows [n, V] in fp64 of the tokens that count, if it has all, and the tokens [n, 1]."""
    ones = [((a, b)[side], counts) for a, b, counts in aligned]
    tokens = [torch.tensor(one.tokens, dtype=torch.int64)[counts] for one, counts in ones]
    rows = [one.rows.double()[counts] for one, counts in ones if one.rows is not None]
    return (torch.cat(rows) if len(rows) == len(ones) else None), torch.cat(tokens).unsqueeze(1)


def with_rows(aligned: Aligned) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Yield (side, its rows, tokens, its values, the other's values) for each side that has rows."""
    mine, theirs = selected(aligned)
    for side, (values, other) in enumerate(((mine, theirs), (theirs, mine))):
        rows, tokens = rows_of(aligned, side)
        if rows is not None and len(rows) == len(values):
            yield ("rollout", "trainer")[side], rows, tokens, values, other


def score_rows(rows: Tensor, tokens: Tensor) -> Tensor:
    """Return log p of the tokens in rows of logits."""
    return rows.log_softmax(-1).gather(1, tokens).squeeze(1)


def find_temperature(aligned: Aligned) -> Finding | None:
    """Return a finding if one temperature, applied to a side's rows, gives the other's values."""
    for side, rows, tokens, values, other in with_rows(aligned):
        finite = torch.where(rows == -torch.inf, -1e30, rows)
        slope = best_slope(lambda a, r=finite, t=tokens, y=other: miss(r, t, y, a))  # type: ignore[misc]
        scored = score_rows(finite * slope, tokens)
        if abs(slope - 1) > 1e-3 and explains(scored, other, values - other):
            detail = (
                f"the other side's log-probabilities are the {side}'s with logits times {slope:.4g}: a temperature of "
                f"{1 / slope:.4g} times the {side}'s; {name_rest(scored, other)}"
            )
            return Finding("semantics", "temperature", detail, len(values), len(values))
    return None


def miss(rows: Tensor, tokens: Tensor, target: Tensor, slope: float) -> float:
    """Return how far rows at a slope are from the target, in squares."""
    return float((score_rows(rows * slope, tokens) - target).square().mean())


def best_slope(miss_of: Callable[[float], float]) -> float:
    """Return the slope from 1/20 to 20 with the least miss: the best of a grid, then by golden section."""
    grid = [20 ** (i / 24 - 1) for i in range(49)]
    costs = [miss_of(a) for a in grid]
    at = costs.index(min(costs))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, 48)]
    golden = (5**0.5 - 1) / 2
    for _ in range(48):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if miss_of(left) < miss_of(right) else (left, high)
    return (low + high) / 2


def find_truncation(aligned: Aligned) -> Finding | None:
    """Return a finding if the difference is the log of the mass that top-k or top-p keeps."""
    declared = {
        (name, float(getattr(one.policy, name)))
        for a, b, _ in aligned
        for one in (a, b)
        for name in ("top_p", "top_k")
        if one.policy.truncates and getattr(one.policy, name)
    }
    both = {("both", 0.0)} if len({name for name, _ in declared}) == 2 else set()
    for side, rows, tokens, values, other in with_rows(aligned):
        if bool((rows == -torch.inf).any()):
            continue
        for name, number in [*both, *sorted(declared), *USUAL]:
            kept = keep(rows, name, number, dict(declared))
            scored = score_rows(torch.where(kept, rows, -torch.inf), tokens)
            if explains(scored, other, values - other):
                mass = float(torch.where(kept, rows, -torch.inf).logsumexp(-1).exp().mean())
                how = (
                    ", ".join(f"{k} {v:g}" for k, v in sorted(declared))
                    if name == "both"
                    else f"{name} {number:g}"
                )
                detail = (
                    f"the {side} scores the whole vocabulary, the other side what {how} keeps: mean kept mass "
                    f"{mass:.3f}; {name_rest(scored, other)}"
                )
                return Finding("semantics", "truncation", detail, len(values), len(values))
    return None


def keep(rows: Tensor, name: str, number: float, declared: dict[str, float]) -> Tensor:
    """Return what a truncation keeps of rows of log-probabilities: top-k first, then top-p of the rest."""
    wanted = declared if name == "both" else {name: number}
    order = rows.argsort(dim=-1, descending=True, stable=True)
    ranked = rows.gather(-1, order)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if "top_k" in wanted:
        kept &= torch.arange(rows.shape[-1]) < int(wanted["top_k"])
    if "top_p" in wanted:
        share = torch.where(kept, ranked, -torch.inf).softmax(-1)
        kept &= share.cumsum(-1) - share < wanted["top_p"]
    return torch.zeros_like(kept).scatter(-1, order, kept)


def find_constant(aligned: Aligned) -> Finding | None:
    """Return a finding if whole rows differ by one number each: the same logits, normalised over other tokens."""
    (mine, tokens), (theirs, _) = rows_of(aligned, 0), rows_of(aligned, 1)
    if mine is None or theirs is None or mine.shape != theirs.shape or len(mine) < LEAST_TOKENS:
        return None
    both = mine.isfinite() & theirs.isfinite()
    apart = torch.where(both, mine - theirs, torch.nan)
    middle = apart.nanmedian(-1, keepdim=True).values
    spread = (apart - middle).abs().nan_to_num(0.0).amax(-1)
    size = middle.abs().squeeze(1)
    lost = int((mine.isfinite() != theirs.isfinite()).sum())
    if float(size.max()) > 1e-4 and bool((spread <= SHARE * size.max()).all()):
        detail = f"rows differ by one number each, up to {float(size.max()):.3g}: the same logits, another normaliser"
        if lost:
            detail += f"; {lost} entries are -inf on one side only"
        return Finding("semantics", "normaliser", detail, len(size), len(tokens))
    return None
