"""Judge claims about integers on many integers, and shrink counter-examples."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.tally import Tally
from isobit.errors import ContractError

FIXED = 2000
LARGEST = 10**12

Integers = dict[str, int]


def domain_of(bound: Bound) -> dict[str, tuple[int | None, int | None]]:
    """Return {name: (low, high)}; None is no limit."""

    def limit(name: str, value: Any) -> int | None:
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ContractError(
            expected=f"integers.{name}: [low, high]",
            received=repr(value),
            remedy="use null for none",
        )

    pairs = bound.claim.params["integers"]
    return {name: (limit(name, pair[0]), limit(name, pair[1])) for name, pair in pairs.items()}


def draw(bound: Bound, count: int, seed: int) -> Iterator[Integers]:
    """Draw integers of every magnitude, and corners of the domain."""
    source, domain = random.Random(seed), domain_of(bound)

    def one(low: int | None, high: int | None) -> int:
        least, most = low if low is not None else -LARGEST, high if high is not None else LARGEST
        if low is None and high is None:
            return source.choice((-1, 1, 1)) * (int(2 ** (source.random() * 40)) - 1)
        corner = source.random()
        if corner < 0.15:
            return source.choice([v for v in (least, least + 1, most) if least <= v <= most])
        span = 2 ** (source.random() * (most - least + 1).bit_length())
        return min(most, least + int(span) - 1)

    for turn in range(count):
        if "draw" in bound.claim.params and turn % 4:
            yield bound.named("draw")(source)
        else:
            yield {name: one(*pair) for name, pair in domain.items()}


def holds(bound: Bound, integers: Integers, raising: bool = False) -> bool:
    """Evaluate the predicate. An exception breaks the claim, but does not catch a planted subject."""
    try:
        return bool(bound.named("predicate")(bound.wrap(bound.subject), **integers))
    except ContractError:
        raise
    except Exception:
        if raising:
            raise
        return False


def examine_integers(bound: Bound, tally: Tally, case: str = "", raising: bool = False) -> None:
    """Judge L2: fixed draws, or the one given case."""
    given = [_parse(case)] if case else draw(bound, FIXED, 0)
    for integers in given:
        tally.count(1)
        tally.compared += 1
        if not holds(bound, integers, raising):
            tally.fail(f"false at {json.dumps(integers)}")


def search_integers(bound: Bound, tally: Tally, enough: int) -> str | None:
    """Judge L3: draw until there are enough; return the smallest counter-example, or None."""
    for integers in draw(bound, max(enough - tally.inputs, 0) + 1, 1):
        tally.count(1)
        tally.compared += 1
        if not holds(bound, integers):
            found = json.dumps(_shrink(bound, integers))
            tally.fail(f"false at {found}")
            return found
    return None


def _shrink(bound: Bound, integers: Integers) -> Integers:
    """Move each number towards its lower end while the claim stays broken."""
    domain, changed = domain_of(bound), True
    while changed:
        changed = False
        for name, value in integers.items():
            least = domain[name][0] if domain[name][0] is not None else 0
            assert least is not None
            for smaller in (least, least + (value - least) // 2, value - 1):
                if least <= smaller < value and not holds(bound, {**integers, name: smaller}):
                    integers, changed = {**integers, name: smaller}, True
                    break
    return integers


def _parse(text: str) -> Integers:
    try:
        return {str(name): int(value) for name, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ContractError(
            expected="integers as a broken claim printed them",
            received=f"{text!r}: {error}",
            remedy="copy it whole",
        ) from None
