"""A certificate in words: its verdict with denominators, what the expression depends on, names of classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from isobit.certifying.records import Certified, Configuration, ExpressionClass, TargetReport

COVERS = "docs/explanation/what-a-certificate-covers.md"
FEW = 4  # configurations that are listed before "and more"
ROWS = "rows"
OUTSIDE = ("a read of ", "a write of ")  # how the reason of an access outside a buffer begins
TUNED = " tuned to"  # ends the name of what an autotuner picks


def counted(number: int, noun: str) -> str:
    """Write a number and a noun, such as `1 row` or `1,024 rows`."""
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {plural}"


def listed(words: Sequence[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def number_expressions(found: Certified) -> dict[str, int]:
    """Return a number per expression, by its digest: targets that share an expression share its number and letter."""
    digests = dict.fromkeys(one.digest for one in found.classes)
    return {digest: at for at, digest in enumerate(digests)}


def letter(at: int) -> str:
    """Return the name of an expression by its number: A to Z, then A2 and so on."""
    return chr(ord("A") + at % 26) + (str(at // 26 + 1) if at >= 26 else "")


def values_of(configuration: Configuration) -> dict[str, str]:
    """Return what a configuration sets, by name, without its target."""
    found = {} if configuration.rows is None else {ROWS: str(configuration.rows)}
    found.update(configuration.settings)
    found.update({f"{name}{TUNED}": chosen for name, chosen in configuration.autotune})
    return found


def axes_of(configurations: Sequence[Configuration]) -> dict[str, list[str]]:
    """Return every name that configurations set, with its values in the sequence in which they come."""
    axes: dict[str, list[str]] = {}
    for one in configurations:
        for name, value in values_of(one).items():
            if value not in axes.setdefault(name, []):
                axes[name].append(value)
    return axes


def describe_members(
    members: Sequence[Configuration], among: Sequence[Configuration], full: bool = False
) -> str:
    """Name some configurations of a target by what tells them from the others.

    Args:
        members: the configurations to name.
        among: all configurations of the target.
        full: list all of them if no short name exists.

    Returns:
        Such as `rows 1, 3`, or `all`; a list if they are not every combination of some values.
    """
    asked = list(dict.fromkeys(one.label for one in members))
    if len(asked) == len({one.label for one in among}):
        return "all" if len(asked) > 1 else asked[0]
    axes, every = axes_of(members), axes_of(among)
    labels = {tuple(sorted(values_of(one).items())) for one in members}
    combined = {tuple(sorted(zip(axes, values, strict=True))) for values in product(*axes.values())}
    known = {tuple(sorted(values_of(one).items())) for one in among}
    if labels == combined & known:
        parts = [f"{n} {_values(v, every[n])}" for n, v in axes.items() if len(v) < len(every[n])]
        if parts:
            return "; ".join(parts)
    return _by_first_axis(members, among, every) or _list(asked, full)


def _by_first_axis(
    members: Sequence[Configuration],
    among: Sequence[Configuration],
    every: dict[str, list[str]],
) -> str:
    """Name configurations that are a few boxes of values, split along the axis that needs the fewest."""
    best: list[str] = []
    for name in every:
        boxes: dict[str, list[str]] = {}  # what the rest is -> values of this axis
        for value in every[name]:
            ours = [one for one in members if values_of(one).get(name) == value]
            others = [one for one in among if values_of(one).get(name) == value]
            if not ours:
                continue
            rest, whole = axes_of(ours), axes_of(others)
            if len({one.label for one in ours}) != prod(len(v) for v in rest.values()):
                break
            words = "; ".join(
                f"{n} {_values(v, whole[n])}"
                for n, v in rest.items()
                if n != name and v != whole[n]
            )
            boxes.setdefault(words, []).append(value)
        else:
            found = [
                f"{name} {_values(values, every[name])}" + (f" with {words}" if words else "")
                for words, values in boxes.items()
            ]
            if found and (not best or len(found) < len(best)):
                best = found
    return " or ".join(best) if 0 < len(best) <= FEW else ""


def _values(values: Sequence[str], every: Sequence[str]) -> str:
    """List values of a name, or those that are missing if they are far fewer."""
    missing = [value for value in every if value not in values]
    if missing and len(values) > FEW * len(missing):
        return f"all but {', '.join(missing)}"
    return ", ".join(values)


def _list(labels: Sequence[str], full: bool) -> str:
    shown = labels if full else labels[:FEW]
    more = len(labels) - len(shown)
    return ", ".join([*shown, f"and {more:,} more"] if more else shown)


def describe_class(found: ExpressionClass, target: TargetReport, full: bool = False) -> str:
    """Name the configurations of a class, and how many rows of one that has several expressions."""
    among = [one.configuration for one in target.outcomes]
    whole = [c for c, rows, of in found.members if rows == of]
    parts = [f"{c.label} ({rows} of {of} rows)" for c, rows, of in found.members if rows != of]
    if parts and whole:
        return f"{describe_members(whole, among, full)}, {_list(parts, full)}"
    return _list(parts, full) if parts else describe_members(whole, among, full)


def class_of(target: TargetReport) -> dict[str, tuple[int, ...]]:
    """Return the classes of every configuration, by its label; several if its rows differ."""
    found: dict[str, list[int]] = {}
    for at, one in enumerate(target.classes):
        for configuration in one.configurations:
            found.setdefault(configuration.label, []).append(at)
    return {label: tuple(sorted(classes)) for label, classes in found.items()}


def find_causes(target: TargetReport) -> list[str]:
    """Return the names whose value alone changes the expression while all others are the same."""
    classes = class_of(target)
    ran = [o.configuration for o in target.outcomes if o.configuration.label in classes]
    causes = []
    for name in axes_of(ran):
        groups: dict[tuple[tuple[str, str], ...], set[tuple[int, ...]]] = {}
        for one in ran:
            rest = tuple((n, v) for n, v in sorted(values_of(one).items()) if n != name)
            groups.setdefault(rest, set()).add(classes[one.label])
        if any(len(found) > 1 for found in groups.values()):
            causes.append(name)
    return causes


def name_cause(name: str) -> str:
    """Return a name as it is used in a sentence."""
    if name.endswith(TUNED):
        return f"what {name.removesuffix(TUNED)} is tuned to"
    return "the number of rows" if name == ROWS else name


def count_configurations(found: Certified) -> str:
    """Return the number of configurations and of what it is a product."""
    total = sum(len(target.outcomes) for target in found.targets)
    factors = [len(found.rows), *(len(values) for _, values in found.vary), len(found.targets)]
    words = [counted(len(found.rows), "row count")] if found.rows else []
    words += [f"{len(values)} {name}" for name, values in found.vary]
    chosen = {c.autotune for t in found.targets for o in t.outcomes for c in [o.configuration]}
    if len(chosen) > 1:
        words.append(counted(len(chosen), "autotune configuration"))
        factors.append(len(chosen))
    words += [counted(len(found.targets), "target")] if len(found.targets) > 1 else []
    where = "" if len(found.targets) > 1 else f" on {found.targets[0].target}"
    whole = counted(total, "configuration") + where
    product_of = prod(max(factor, 1) for factor in factors)
    return f"{whole} ({' × '.join(words)})" if len(words) > 1 and product_of == total else whole


def conclude(found: Certified) -> str:
    """Return the verdict as a sentence or a few.

    Args:
        found: a certificate.

    Returns:
        What was shown about how many configurations, and from how many compared names.

    Example:
        >>> from isobit.certifying.records import Certified
        >>> conclude(Certified("matmul.py:matmul", ()))
        'Nothing was compiled, so nothing follows.'
    """
    if not any(target.outcomes for target in found.targets):
        return "Nothing was compiled, so nothing follows."
    same = bool(found.targets) and all(target.kept for target in found.targets)
    parts = _kept(found) if same else _not_kept(found)
    return " ".join([*parts, *describe_rows(found), *describe_compared(found)])


def describe_rows(found: Certified) -> list[str]:
    """Return for which row counts a verdict is: those that were executed, and what others launch."""
    parts = []
    if found.kept and len(found.rows) > 1:
        tried = listed([f"{rows:,}" for rows in found.rows])
        parts.append(f"Row counts tried: {tried}.")
        if found.scanned and not found.unjudged:
            parts[0] = (
                f"Row counts tried: {tried}; {len(found.scanned)} others up to {max(found.scanned):,} launch the same "
                "compiled kernels."
            )
        if found.most_rows:
            parts.append(
                f"Every row count up to {found.most_rows:,} that launches these kernels, with grids and numbers by the "
                "same rules, has the same expression: only masks of rows depend on the number of rows."
            )
        elif reasons := dict.fromkeys(t.rows_reason for t in found.targets if t.rows_reason):
            parts.append(f"For the row counts tried only: {next(iter(reasons))}.")
    if left := (*found.unsettled, *found.unjudged):
        also = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        parts.append(f"Not judged: {left[0]}{also}.")
    return parts


def describe_compared(found: Certified) -> list[str]:
    """Return how many names and rows were compared."""
    if not found.names:
        return []
    counts = [t.rows_compared for t in found.targets if t.rows_compared is not None]
    total = sum(target.rows for target in found.targets)
    rows = f", in {sum(counts):,} of {counted(total, 'row')}" if counts else ""
    return [f"{counted(found.names, 'name')} compared{rows}."]


def _kept(found: Certified) -> list[str]:
    count = count_configurations(found)
    single = sum(len(target.outcomes) for target in found.targets) == 1
    if single:
        rows = found.targets[0].rows
        if rows == 1:
            return [f"One expression in {count}: there was nothing to compare it with."]
        return [f"One expression in all {rows:,} rows of {count}."]
    model = _model_of_matrices(found)
    if len(found.targets) > 1 and len(found.groups) != 1:
        same = "; ".join(listed(group) for group in found.groups if len(group) > 1)
        also = f" {same}: the same expression." if same else ""
        each = f"One expression on each target in all {count}:"
        bits = "a row has the same bits in each of a target's, for all float inputs"
        return [f"{each} {bits}{model}.{also}"]
    approximate = approximations(found)
    if approximate and len(found.targets) > 1:
        return [
            f"The same expression in all {count}; the same bits on each target, for all float inputs{model}. Between "
            f"targets bits may differ: each GPU has its own approximation of {listed(approximate)}."
        ]
    return [
        f"One expression in all {count}: a row has the same bits in each, for all float inputs{model}."
    ]


def _model_of_matrices(found: Certified) -> str:
    """Return the condition under which several kinds of matrix instructions have one result, or ""."""
    several = dict.fromkeys(
        listed(sorted(kinds))
        for target in found.targets
        for one in target.classes
        if len(kinds := kinds_of(one, target)) > 1
    )
    if not several:
        return ""
    return f", if {'; '.join(several)} round alike, as MMA-Sim's model has it"


def approximations(found: Certified) -> list[str]:
    """Return the instructions of the compiled kernels that each GPU approximates in its own way."""
    kernels = [one for target in found.targets for one in target.kernels]
    return sorted({opcode for one in kernels for opcode in one.approximate})


def matrix_instructions(target: TargetReport) -> dict[str, list[Configuration]]:
    """Return the kinds of matrix instructions of a target's configurations: "wgmma.mma_async" and so on."""
    found: dict[str, list[Configuration]] = {}
    for outcome in target.outcomes:
        opcodes = {o for at in outcome.kernels for o in target.kernels[at].tensor_core}
        if opcodes:
            kinds = " and ".join(sorted({".".join(o.split(".")[:2]) for o in opcodes}))
            found.setdefault(kinds, []).append(outcome.configuration)
    return found


def matrix_notes(found: Certified) -> list[str]:
    """Return which matrix instruction each configuration has, and what the equality of several rests on."""
    notes = []
    for target in found.targets:
        kinds = matrix_instructions(target)
        among = [one.configuration for one in target.outcomes]
        if len(kinds) == 1:
            notes.append(f"on {target.target}, matrix products are made by {next(iter(kinds))}")
        elif kinds:
            each = "; ".join(f"{k} in {describe_members(m, among)}" for k, m in kinds.items())
            text = f"on {target.target}, matrix products are made by {each}"
            if any(len(kinds_of(one, target)) > 1 for one in target.classes):
                text += (
                    ". That these instructions give the same bits is a published model of the tensor cores "
                    "(MMA-Sim), not something that was measured here"
                )
            notes.append(text)
    return notes


def kinds_of(one: ExpressionClass, target: TargetReport) -> set[str]:
    """Return the kinds of matrix instructions that configurations with one expression have."""
    members = set(one.configurations)
    kinds = matrix_instructions(target)
    return {kind for kind, found in kinds.items() if members & set(found)}


def _not_kept(found: Certified) -> list[str]:
    parts = []
    apart = [target for target in found.targets if len(target.classes) > 1]
    if apart:
        numbers = {len(target.classes) for target in apart}
        most = f"{max(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
        where = "" if len(apart) == len(found.targets) else f" on {_names(apart)}"
        each = " on each target" if len(apart) > 1 else ""
        causes = list(dict.fromkeys(name for target in apart for name in find_causes(target)))
        why = listed([name_cause(name) for name in causes])
        so = f": how a row is computed depends on {why}." if why else ": rows of one call differ."
        parts.append(f"{most} expressions{where or each} in {count_configurations(found)}{so}")
    broken = [one for target in found.targets for one in target.broken]
    refused = [one for target in found.targets for one in target.refused]
    total = count_configurations(found)
    if broken:
        share = f"all {total}" if len(broken) == _total(found) else f"{len(broken)} of {total}"
        outside = all(one.reason.startswith(OUTSIDE) for one in broken)
        what = "a kernel leaves its buffers" if outside else "the inputs do not fix the result"
        parts.append(f"In {share} {what}: {_reasons(broken)}")
    if refused:
        share = f"all {total}" if len(refused) == _total(found) else f"{len(refused)} of {total}"
        parts.append(f"No verdict on {share}: {_reasons(refused)}")
    return parts or [f"Not enough ran in {total} to say."]


def _total(found: Certified) -> int:
    return sum(len(target.outcomes) for target in found.targets)


def _names(targets: Sequence[TargetReport]) -> str:
    return listed([target.target for target in targets])


def _reasons(outcomes: Sequence[object]) -> str:
    reasons = list(
        dict.fromkeys(str(getattr(one, "reason", "")) or "no reason" for one in outcomes)
    )
    more = f" (and {counted(len(reasons) - 1, 'other reason')})" if len(reasons) > 1 else ""
    return f"{reasons[0].rstrip('.')}{more}."


def tone(found: Certified) -> str:
    """Return a class of colours for the verdict."""
    return ("good", "bad", "mute")[found.exit_code]


def cautions(found: Certified) -> list[str]:
    """Return what a kernel author should look at in the compiled code, though it does not change the verdict."""
    kernels = [one for target in found.targets for one in target.kernels]
    notes = matrix_notes(found)
    spilled = sorted({one.kernel for one in kernels if one.spill_bytes})
    if spilled:
        notes.append(
            f"Registers are spilled to memory in {listed(spilled)}: slow, but the same bits."
        )
    return notes


def join_notes(found: Certified) -> list[str]:
    """Return all notes, those that say the same of several targets joined: `on sm_80 and sm_90, …`."""
    groups: dict[str, list[str]] = {}
    for note in (*found.notes, *cautions(found)):
        target = next((t.target for t in found.targets if note.startswith(f"on {t.target}, ")), "")
        groups.setdefault(note.removeprefix(f"on {target}, ") if target else note, []).append(
            target
        )
    return [
        f"on {listed(targets)}, {rest}" if targets[0] else rest for rest, targets in groups.items()
    ]
