"""What changed between two versions of a contract, promise by promise, and what that asks of the version number."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.contracts.judge.sabotage_names import default_sabotage
from isobit.contracts.language.contract import Claim, Contract, Equation, Inputs, Params, Waiver
from isobit.contracts.language.explain import say_sizes
from isobit.contracts.store.ladder import level_number

BUMPS = ("none", "patch", "minor", "major")

# A promise that changed in a way that has no order (another reference, another unit) is a promise taken back.
BUMP_OF = {
    "reworded": "patch",
    "added": "minor",
    "tightened": "minor",
    "changed": "major",
    "loosened": "major",
    "removed": "major",
}


@dataclass(frozen=True)
class Alteration:
    """One thing that is not as it was."""

    kind: str  # a key of BUMP_OF
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Change:
    """All alterations between two versions of a contract, and what they ask of the version number."""

    old_version: str
    new_version: str
    advice: str  # one of BUMPS: what the worst alteration asks for
    bump: str  # what was done to the version: one of BUMPS, or `back`
    needed: str  # the lowest version that follows the advice
    enough: bool  # whether the new version does
    alterations: tuple[Alteration, ...]

    def __str__(self) -> str:
        said = f"{self.advice}: {self.old_version} → {self.new_version} is "
        said += "enough" if self.enough else f"not enough, at least {self.needed}"
        return "\n".join([*map(str, self.alterations), said])


def diff(old: Contract, new: Contract) -> Change:
    """Part by part; parts are the same where their ids are."""
    found = (
        *_head(old, new),
        *_equations(old.equations, new.equations),
        *_obligations(old, new),
        *_all_inputs(old, new),
        *_claims(old, new),
        *_waivers(old, new),
    )
    advice = max((BUMP_OF[a.kind] for a in found), key=BUMPS.index, default="none")
    before, after = numbers_of(old.version), numbers_of(new.version)
    bump = "back" if after < before else bump_between(before, after)
    enough = bump != "back" and BUMPS.index(bump) >= BUMPS.index(advice)
    return Change(old.version, new.version, advice, bump, raised(before, advice), enough, found)


def numbers_of(version: str) -> tuple[int, ...]:
    """1.0.0 is (1, 0, 0)."""
    return tuple(int(part) for part in version.split("."))


def bump_between(old: tuple[int, ...], new: tuple[int, ...]) -> str:
    """The first part that differs."""
    return next(
        (word for word, a, b in zip(("major", "minor", "patch"), old, new, strict=True) if a != b),
        "none",
    )


def raised(version: tuple[int, ...], bump: str) -> str:
    """The next version of that kind."""
    major, minor, patch = version
    nexts = {
        "major": (major + 1, 0, 0),
        "minor": (major, minor + 1, 0),
        "patch": (major, minor, patch + 1),
    }
    return ".".join(map(str, nexts.get(bump, version)))


# ---- how two values differ ------------------------------------------------------------------------------


def _swap(what: str, old: Any, new: Any) -> Iterator[Alteration]:
    """A value that may be absent."""
    if old != new:
        kind = (
            "added" if old in ("", (), None) else "removed" if new in ("", (), None) else "changed"
        )
        yield Alteration(kind, what, _arrow(old, new))


def _reword(what: str, old: Any, new: Any) -> Iterator[Alteration]:
    """A value that promises nothing."""
    if old != new:
        yield Alteration("reworded", what, _arrow(old, new))


def _grow(what: str, old: Collection[Any], new: Collection[Any]) -> Iterator[Alteration]:
    """A collection that promises the more, the more is in it."""
    for kind, word, more, less in (
        ("loosened", "without", old, new),
        ("tightened", "with", new, old),
    ):
        gone = [item for item in more if item not in less]
        if gone:
            sizes = all(isinstance(item, int) for item in gone)
            yield Alteration(
                kind, what, f"{word} {say_sizes(gone) if sizes else ', '.join(map(str, gone))}"
            )


def _raise(what: str, old: float | None, new: float | None, loosens: bool) -> Iterator[Alteration]:
    """A number: a limit loosens as it rises, a lower bound tightens; None is no promise."""
    if old == new:
        return
    looser = (new is None) if old is None or new is None else (new > old) == loosens
    yield Alteration("loosened" if looser else "tightened", what, _arrow(old, new))


def _arrow(old: Any, new: Any) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) or "none"
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(str, value))}]"
        return "none" if value in ("", None) else str(value)

    return f"{shown(old)} → {shown(new)}"


# ---- the parts of a contract ----------------------------------------------------------------------------


def _head(old: Contract, new: Contract) -> Iterator[Alteration]:
    yield from _swap("id", old.id, new.id)
    yield from _reword("title", old.title, new.title)
    yield from _swap("subject", old.subject, new.subject)
    yield from _swap("operator", old.operator, new.operator)
    yield from _swap("output", old.output, new.output)
    yield from _grow("depends_on", old.depends_on, new.depends_on)
    yield from _reword("references", old.references, new.references)
    yield from _reword("other subjects", old.subjects, new.subjects)


def _equations(old: Mapping[str, Equation], new: Mapping[str, Equation]) -> Iterator[Alteration]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            formulas = (before.formula if before else ""), (after.formula if after else "")
            yield from _swap(f"equation {name}", *formulas)
            continue
        for part in ("formula", "domain", "codomain"):
            # Spaces and line breaks are how it is written, not what it says.
            texts = [" ".join(str(getattr(side, part)).split()) for side in (before, after)]
            yield from _swap(f"equation {name}: {part}", *texts)


def _obligations(old: Contract, new: Contract) -> Iterator[Alteration]:
    before, after = ({o.id: o for o in side.obligations} for side in (old, new))
    for id in dict.fromkeys((*before, *after)):
        what = f"obligation {id}"
        if id not in after:
            yield Alteration("removed", what, before[id].text)
        elif id not in before:
            yield Alteration("added", what, after[id].text)
        else:
            yield from _reword(what, before[id].text, after[id].text)
            yield from _reword(f"{what}: equation", before[id].equation, after[id].equation)


def _all_inputs(old: Contract, new: Contract) -> Iterator[Alteration]:
    used = {side is new: _drawn(side) for side in (old, new)}
    for name in dict.fromkeys((*old.inputs, *new.inputs)):
        what = f"inputs {name}"
        promised = name in used[False]  # inputs that no claim drew from promised nothing
        if name not in new.inputs:
            yield Alteration(
                "removed" if promised else "reworded",
                what,
                "" if promised else "no claim drew from it",
            )
        elif name not in old.inputs:
            yield Alteration("added" if name in used[True] else "reworded", what)
        else:
            for found in _inputs(what, old.inputs[name], new.inputs[name]):
                yield (
                    found
                    if promised
                    else replace(found, kind="reworded", detail=f"{found.detail}; never drawn from")
                )


def _drawn(contract: Contract) -> set[str]:
    proofs = {claim.proof.inputs for claim in contract.claims if claim.proof}
    return {name for claim in contract.claims for name in claim.inputs} | proofs


def _inputs(what: str, old: Inputs, new: Inputs) -> Iterator[Alteration]:
    for part in ("arguments", "values", "rows", "options"):
        before, after = getattr(old, part), getattr(new, part)
        if before != after:
            yield Alteration("changed", f"{what}: {part}", _arrow(before, after))
    yield from _grow(f"{what}: dtypes", old.dtypes, new.dtypes)
    yield from _grow(f"{what}: edges", old.edges, new.edges)
    for word, before, after in (
        ("sizes", old.sizes, new.sizes),
        ("thorough", old.thorough, new.thorough),
    ):
        for size in dict.fromkeys((*before, *after)):
            yield from _grow(f"{what}: {word} of {size}", before.get(size, ()), after.get(size, ()))


def _claims(old: Contract, new: Contract) -> Iterator[Alteration]:
    before, after = ({c.id: c for c in side.claims} for side in (old, new))
    for id in dict.fromkeys((*before, *after)):
        if id not in after:
            yield Alteration("removed", f"claim {id}", before[id].relation)
        elif id not in before:
            yield Alteration("added", f"claim {id}", f"{after[id].relation}, {after[id].level}")
        else:
            yield from _claim(f"claim {id}", before[id], after[id])


def _claim(what: str, old: Claim, new: Claim) -> Iterator[Alteration]:
    yield from _reword(f"{what}: text", old.text, new.text)
    if old.relation != new.relation:
        yield Alteration("changed", f"{what}: relation", _arrow(old.relation, new.relation))
    else:
        yield from _params(what, old, new)
    if old.level != new.level:
        rose = level_number(new.level) > level_number(old.level)
        yield Alteration(
            "tightened" if rose else "loosened", f"{what}: level", _arrow(old.level, new.level)
        )
    yield from _grow(f"{what}: obligations", old.obligations, new.obligations)
    yield from _grow(f"{what}: inputs", old.inputs, new.inputs)
    if old.inputs[:1] != new.inputs[:1]:
        yield Alteration(
            "changed", f"{what}: inputs of L3 and sabotage", _arrow(old.inputs[:1], new.inputs[:1])
        )
    if old.sabotage != new.sabotage:  # none named means the library's
        yield from _grow(f"{what}: sabotage", _planted(old), _planted(new))
    yield from _grow(f"{what}: control", old.control, new.control)
    if old.proof is None or new.proof is None:
        if old.proof != new.proof:
            engines = tuple(side.proof.engine if side.proof else None for side in (old, new))
            yield Alteration(
                "loosened" if new.proof is None else "tightened", f"{what}: proof", _arrow(*engines)
            )
        return
    for part in ("engine", "by", "planted", "inputs"):
        yield from _swap(
            f"{what}: proof: {part}", getattr(old.proof, part), getattr(new.proof, part)
        )


def _planted(claim: Claim) -> Sequence[str]:
    return claim.sabotage or default_sabotage(claim.relation, claim.params)


def _params(what: str, old: Claim, new: Claim) -> Iterator[Alteration]:
    for key in dict.fromkeys((*old.params, *new.params)):
        before, after = old.params.get(key), new.params.get(key)
        place = f"{what}: {key}"
        if key == "under":
            yield from _grow(place, before or (), after or ())
        elif key == "integers":
            yield from _integers(place, before or {}, after or {})
        elif key == "limit" and (
            before is None or after is None
        ):  # parity without a limit is parity to the bit
            yield Alteration(
                "loosened" if before is None else "tightened", place, _arrow(before, after)
            )
        elif key == "limit":
            yield from _raise(place, before, after, loosens=True)
        elif key in ("low", "high"):
            yield from _raise(place, before, after, loosens=key == "high")
        elif key == "of":
            yield from _swap(place, before or "output", after or "output")
        elif key == "unit" and (before is None or after is None):
            continue  # comes and goes with the limit, which says so
        elif before != after:
            yield Alteration("changed", place, _arrow(before, after))


def _integers(what: str, old: Params, new: Params) -> Iterator[Alteration]:
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new:
            yield Alteration("changed", f"{what}: {name}", _arrow(old.get(name), new.get(name)))
            continue
        for end, at, none in (("low", 0, -math.inf), ("high", 1, math.inf)):
            before, after = (
                none if side[name][at] is None else side[name][at] for side in (old, new)
            )
            yield from _raise(f"{what}: {name}: {end}", before, after, loosens=end == "low")


def _waivers(old: Contract, new: Contract) -> Iterator[Alteration]:
    before, after = ({w.claim: w for w in side.waivers} for side in (old, new))
    known = {claim.id for claim in old.claims}
    for id in dict.fromkeys((*before, *after)):
        what = f"waiver of {id}"
        if id not in before:
            yield Alteration("loosened" if id in known else "added", what, _until(after[id]))
        elif id not in after:
            yield Alteration("tightened", what, f"no longer {_until(before[id])}")
        else:
            yield from _reword(f"{what}: reason", before[id].reason, after[id].reason)
            yield from _reword(f"{what}: owner", before[id].owner, after[id].owner)
            if before[id].expires != after[id].expires:
                later = after[id].expires > before[id].expires
                dates = _arrow(before[id].expires, after[id].expires)
                yield Alteration("loosened" if later else "tightened", f"{what}: expires", dates)


def _until(waiver: Waiver) -> str:
    return f"{waiver.reason}, until {waiver.expires}"
