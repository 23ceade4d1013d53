"""An audit as plain text for a terminal: the conclusion, the axes, who is to blame, and what was not judged."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from isobit.auditing.records import Audit, AxisReport
from isobit.auditing.report.sentence import (
    conclude,
    counted,
    cumulated,
    differing,
    flipped,
    magnitude,
    percent,
    total_of,
    ulps_of,
    unjudged_by_reason,
)
from isobit.foundation.plain_text import one_line

BLAMED, REASONS = 20, 8  # rows per axis
NAME, SOURCE = 58, 36  # characters
MATRIX = (
    "axis",
    "guilty",
    "judged",
    "no verdict",
    "results that differ",
    "max |Δ|",
    "mean(e^d-1-d)",
    "flips",
    "outside",
    "complete",
)


def describe_audit(audit: Audit, width: int = 100) -> str:
    """Return an audit as text.

    Args:
        audit: what was found. Control characters in its text are removed.
        width: characters per line of the sentences; tables are as wide as they need to be.

    Returns:
        Lines of text: the conclusion, a row per axis, the guilty operators with the largest shares, the operators
        without a verdict by reason, and whether the lists are complete.

    Example:
        >>> from isobit.auditing.records import Audit, AxisReport
        >>> axis = AxisReport("repeat", "the same run twice", ("first", "second"), judged=3, complete=True)
        >>> print(describe_audit(Audit("tiny", "2 samples", (axis,))).splitlines()[2])
        None of 3 judged operators changes from run to run: first and second agree bit for bit.
    """
    about = f"Audit of {audit.model}" + (f": {audit.inputs}" if audit.inputs else "")
    parts = [one_line(about), textwrap.fill(one_line(conclude(audit)), width)]
    if audit.axes or audit.skipped:
        parts.append(_matrix(audit))
    parts += [_blame(axis) for axis in audit.axes if axis.guilty]
    unjudged = [_unjudged(axis, width) for axis in audit.axes if axis.unjudged]
    if unjudged:
        parts.append("\n".join(["Not judged", *unjudged]))
    return "\n\n".join([*parts, _closing(audit, width)]) + "\n"


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Return a table with two spaces between columns; those in `right` are aligned at their right."""
    lines = [[one_line(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[at]) for row in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at])
            for at, cell in enumerate(row)
        ).rstrip()
        for row in lines
    )


def _matrix(audit: Audit) -> str:
    rows = []
    for axis in audit.axes:
        effect = axis.effect
        rows.append(
            (
                axis.axis,
                f"{len(axis.guilty):,}",
                f"{axis.judged:,}",
                f"{len(axis.unjudged):,}",
                differing(effect),
                magnitude(effect.largest if effect else None),
                magnitude(effect.k3 if effect else None),
                flipped(effect),
                percent(effect.outside if effect else None),
                "yes" if axis.complete else "no",
            )
        )
    shown = [_aligned(MATRIX, rows, (1, 2, 3, 5, 6, 7, 8))] if rows else []
    skipped = [one_line(f"{one.axis}: not audited, {one.reason}") for one in audit.skipped]
    skipped += [one_line(f"{one.axis}: left out, {one.reason}") for one in audit.left_out]
    totals = [one_line(f"{one.axis}: {total_of(one)}") for one in audit.axes if one.not_compared]
    return "\n".join(shown + skipped + totals)


def _cut(text: str, room: int) -> str:
    """Keep the end of a text, which names a module or a line better than its start."""
    text = one_line(text)
    return text if len(text) <= room else f"…{text[1 - room :]}"


def _blame(axis: AxisReport) -> str:
    sums = cumulated(axis.guilty)
    rows = []
    for one, total in list(zip(axis.guilty, sums, strict=True))[:BLAMED]:
        rows.append(
            (
                percent(one.share),
                percent(total),
                _cut(str(one.place), NAME),
                one.kind,
                f"{one.elements:,} of {one.of:,}",
                ulps_of(one),
                _cut(one.place.source, SOURCE),
            )
        )
    heads = ("share", "together", "operator", "kind", "elements", "ulp", "source")
    lines = [
        f"Guilty on the axis {one_line(axis.axis)}: {one_line(axis.variation)}",
        _aligned(heads, rows, (0, 1, 4, 5)),
    ]
    more = len(axis.guilty) - len(rows)
    return "\n".join([*lines, f"and {more:,} more"] if more else lines)


def _unjudged(axis: AxisReport, width: int) -> str:
    found = unjudged_by_reason(axis)
    lines = []
    for reason, count, operators in found[:REASONS]:
        names = ", ".join(name for name, _ in operators[:4]) + (", …" if len(operators) > 4 else "")
        text = one_line(f"{axis.axis}: {count:,} × {reason} ({names})")
        lines.append(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    "))
    more = sum(count for _, count, _ in found[REASONS:])
    if more:
        reasons = counted(len(found) - REASONS, "other reason")
        lines.append(f"  {one_line(axis.axis)}: {more:,} for {reasons}")
    return "\n".join(lines)


def _closing(audit: Audit, width: int) -> str:
    """Return whether every list is complete, and what is missing where it is not."""
    if not audit.axes:
        return "Complete: no, nothing was audited."
    if audit.complete:
        return "Complete: yes. On every axis the variant is reached by the guilty operators alone."
    reasons = "; ".join(
        f"{axis.axis}: {axis.why_not or 'no reason was recorded'}"
        for axis in audit.axes
        if not axis.complete
    )
    return textwrap.fill(one_line(f"Complete: no. {reasons}"), width)
