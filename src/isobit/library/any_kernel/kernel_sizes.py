"""The sizes at which `isobit check` judges a kernel, and the words for them.

Contracts list three kinds of inputs: small ones, which every claim is judged on, `wide` ones (a hidden size, a row of a
vocabulary) and `many` rows. The PTX machine takes milliseconds per program, so compiled kernels get fewer small sizes,
and the others for accuracy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from isobit.contracts.language.contract import Contract, Inputs
from isobit.errors import ArgumentError

LARGE = ("wide", "many")
# More than 16 rows: planted kernels change their order there. An embedding's first and last id are among few.
FEW = {"rows": (3, 18), "samples": (18,), "n": (40,), "v": (40,), "tokens": (1, 3)}
FEW_IDS = {"rows": (3, 33), "v": (5,)}
FEW_WIDE = {"rows": (2,), "samples": (1,)}

Sizes = Mapping[str, tuple[int, ...]]


def with_few_sizes(contract: Contract, like: str, quick: bool) -> Contract:
    """Return a contract with few sizes: the small ones, and unless it must be quick, large ones for accuracy."""
    small = FEW | (FEW_IDS if like == "embedding" else {})
    inputs = {}
    for name, drawn in contract.inputs.items():
        if name == "wide":
            chosen = {size: FEW_WIDE.get(size, values[:1]) for size, values in drawn.sizes.items()}
        elif name == "many":
            chosen = dict(drawn.sizes)
        else:
            chosen = {size: small.get(size, values) for size, values in drawn.sizes.items()}
        inputs[name] = replace(drawn, sizes=chosen)
    kept = {
        c.id: c.inputs if c.id == "accuracy" and not quick else first_of(c.inputs)
        for c in contract.claims
    }
    claims = tuple(replace(claim, inputs=kept[claim.id]) for claim in contract.claims)
    return only_used(replace(contract, inputs=inputs, claims=claims))


def with_given_sizes(contract: Contract, given: Sequence[tuple[str, tuple[int, ...]]]) -> Contract:
    """Return a contract that is judged at the sizes of the command line, and at no large ones of its own.

    Raises:
        ArgumentError: If the operator has no size of that name, or a name is given twice.
    """
    known = next(iter(contract.inputs.values())).sizes
    names = [name for name, _ in given]
    for name in names:
        if name not in known or names.count(name) > 1:
            raise ArgumentError(
                expected=f"each size once, of {', '.join(known)}",
                received=f"--sizes {name}" + " twice" * (names.count(name) > 1),
                remedy="for example --sizes " + list(known)[-1] + "=4096,32768",
            )
    inputs = {
        name: replace(drawn, sizes={**drawn.sizes, **dict(given)})
        for name, drawn in contract.inputs.items()
        if name not in LARGE
    }
    claims = tuple(replace(claim, inputs=first_of(claim.inputs)) for claim in contract.claims)
    return replace(contract, inputs=inputs, claims=claims)


def first_of(inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of inputs that are not large."""
    return tuple(name for name in inputs if name not in LARGE)


def only_used(contract: Contract) -> Contract:
    """Leave out inputs that no claim has."""
    used = {name for claim in contract.claims for name in claim.inputs}
    return replace(contract, inputs={n: i for n, i in contract.inputs.items() if n in used})


def sizes_in_words(contract: Contract) -> list[str]:
    """Return a line per inputs: "x [rows, n]: rows 1, 33, 130; n 7, 64, 300; float32 (all claims)"."""
    found = []
    for name, drawn in contract.inputs.items():
        claims = [claim.id for claim in contract.claims if name in claim.inputs]
        of = "all claims" if len(claims) == len(contract.claims) else ", ".join(claims)
        found.append(f"{words_of(drawn)} ({of})")
    return found


def words_of(drawn: Inputs) -> str:
    """Return the shapes of inputs, their sizes and dtypes."""
    shapes = ", ".join(
        f"{name} [{', '.join(map(str, axes))}]" for name, axes in drawn.arguments.items()
    )
    sizes = "; ".join(
        f"{size} {', '.join(f'{value:,}' for value in values)}"
        for size, values in drawn.sizes.items()
    )
    return f"{shapes}: {sizes}; {', '.join(drawn.dtypes)}"
