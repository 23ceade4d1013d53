"""Pictures of a certificate: the map of its configurations, and orders of addition."""

from __future__ import annotations

from collections.abc import Sequence

from isobit.certifying.records import BROKEN, Certified, Configuration, Outcome, TargetReport
from isobit.certifying.report.words import (
    ROWS,
    class_of,
    counted,
    describe_class,
    letter,
    name_cause,
    number_expressions,
)
from isobit.order.addition import Branch, step_digests, steps_of
from isobit.report.markup import STYLE, Canvas, escape
from isobit.reveal.report import WIDTH, OrderPicture
from isobit.reveal.tree import Tree

# The map of a certificate: a cell per configuration, in the colour of its expression.

COLOURS = 8  # expressions with a colour of their own; the others are grey
# Colours with equal lightness that also people with colour blindness tell apart; light and dark pages.
MAP_STYLE = """
:root{--c0:#446f9e;--c1:#b84f12;--c2:#2b7d62;--c3:#7a5fa8;--c4:#8a6a12;--c5:#a4476f;--c6:#4c7322;--c7:#7a6a5d}
@media (prefers-color-scheme:dark){:root{--c0:#7fb0e3;--c1:#f08a4b;--c2:#6cc7a8;--c3:#b79be3;--c4:#dcb95a;--c5:#e08ab3;
--c6:#9cc46a;--c7:#b3a294}}
.maps{display:flex;flex-wrap:wrap;gap:1.2rem 2.2rem;margin:.6rem 0}.map{border-collapse:separate;border-spacing:3px;
width:auto;margin:0}.map tr{border:0}.map th{font-size:.8rem;padding:0 .3rem;text-align:center;vertical-align:middle}
.map th.side{text-align:right;padding-right:.5rem;font-family:ui-monospace,Menlo,Consolas,monospace}
.map caption{text-align:left;font-weight:600;padding:0 0 .3rem .2rem}.map caption span{font-weight:400}
.map td{min-width:2.6rem;height:2rem;padding:0;text-align:center;vertical-align:middle;border-radius:5px;color:#fff;
font-weight:650;background:var(--tone)}
@media (prefers-color-scheme:dark){.map td{color:#14171d}}
.map td.none{background:transparent}
.map td.refused{background:transparent;color:var(--mute);border:1px dashed var(--mute)}
.map td.broken{background:transparent;color:var(--bad);border:2px solid var(--bad)}
.map td.several{background:linear-gradient(135deg,var(--tone) 50%,var(--other) 50%)}
.k0{--tone:var(--c0)}.k1{--tone:var(--c1)}.k2{--tone:var(--c2)}.k3{--tone:var(--c3)}.k4{--tone:var(--c4)}
.k5{--tone:var(--c5)}.k6{--tone:var(--c6)}.k7{--tone:var(--c7)}.k8{--tone:var(--mute)}
.o0{--other:var(--c0)}.o1{--other:var(--c1)}.o2{--other:var(--c2)}.o3{--other:var(--c3)}.o4{--other:var(--c4)}
.o5{--other:var(--c5)}.o6{--other:var(--c6)}.o7{--other:var(--c7)}.o8{--other:var(--mute)}
.key{display:inline-block;min-width:1.4rem;text-align:center;border-radius:4px;color:#fff;font-weight:650;
background:var(--tone);padding:0 .25rem}@media (prefers-color-scheme:dark){.key{color:#14171d}}
"""


def key(at: int) -> str:
    """Return the letter of an expression in its colour."""
    return f'<span class="key k{min(at, COLOURS)}">{letter(at)}</span>'


def draw_map(found: Certified) -> str:
    """Return a table of cells per target: row counts along the top, everything else down the side."""
    numbers = number_expressions(found)
    maps = "".join(_target(target, numbers) for target in found.targets if target.outcomes)
    if not maps:
        return '<p class="soft">Nothing was run.</p>'
    return f'<div class="maps">{maps}</div>{_legend(found, numbers)}'


def _legend(found: Certified, numbers: dict[str, int]) -> str:
    """Return which letter is which expression, on which targets."""
    lines = []
    for digest, at in numbers.items():
        targets = [t.target for t in found.targets if digest in {one.digest for one in t.classes}]
        on = escape(", ".join(targets))
        lines.append(f"{key(at)} <code>{escape(digest[:16])}</code> on {on}")
    if not lines:
        return ""
    same = "A letter is an expression: the same letter on two targets is the same expression."
    return f'<p class="soft">{same} {"; ".join(lines)}</p>'


def _side(configuration: Configuration) -> str:
    """Return what a configuration sets besides the number of rows."""
    rest = [f"{name}={value}" for name, value in configuration.settings]
    return " ".join([*rest, *(chosen for _, chosen in configuration.autotune)])


def _target(target: TargetReport, numbers: dict[str, int]) -> str:
    classes = {
        label: tuple(numbers[target.classes[at].digest] for at in found)
        for label, found in class_of(target).items()
    }
    columns = list(dict.fromkeys(one.configuration.rows for one in target.outcomes))
    sides: dict[str, dict[int | None, Outcome]] = {}
    for one in target.outcomes:
        sides.setdefault(_side(one.configuration), {})[one.configuration.rows] = one
    caption = f"{escape(target.target)} <span class='soft'>{_say(target)}</span>"
    heads = "".join(f"<th>{'' if rows is None else f'{rows:,}'}" for rows in columns)
    corner = "" if columns == [None] else name_cause(ROWS).removeprefix("the ").capitalize()
    head = f'<tr><th class="side">{corner}{heads}</tr>' if columns != [None] else ""
    body = "".join(
        f'<tr><th class="side">{escape(side)}'
        + "".join(_cell(cells.get(rows), classes) for rows in columns)
        + "</tr>"
        for side, cells in sides.items()
    )
    return f'<div class="map-box"><table class="map"><caption>{caption}</caption>{head}{body}</table></div>'


def _say(target: TargetReport) -> str:
    return counted(len(target.classes), "expression") if target.classes else "no expression"


def _cell(one: Outcome | None, classes: dict[str, tuple[int, ...]]) -> str:
    if one is None:
        return '<td class="none">'
    title = f' title="{escape(str(one.configuration))}: {{}}"'
    found = classes.get(one.configuration.label, ())
    if not found:
        sign, kind = ("✗", "broken") if one.verdict == BROKEN else ("?", "refused")
        return f'<td class="{kind}"{title.format(escape(one.reason or one.verdict))}>{sign}'
    words = title.format(f"{one.names:,} names")
    if len(found) == 1:
        return f'<td class="k{min(found[0], COLOURS)}"{words}>{letter(found[0])}'
    kinds = f"several k{min(found[0], COLOURS)} o{min(found[1], COLOURS)}"
    return f'<td class="{kinds}"{words}>{"".join(letter(at) for at in found[:3])}'


# Orders of addition in a certificate: as words, and as pictures side by side with what they share in one colour.

HEAD = 50
WORDS_A_LINE = 84
PICTURES = 6  # expressions that are drawn


def gather_steps(branch: Branch) -> Branch:
    """Put the products of each tensor-core step below one node, beside the sum so far.

    A step adds its products and the sum so far in one addition. Drawn like that, a chain of steps is a comb of
    hundreds of teeth; with the products of a step together it is a chain of groups, as kernel authors think of it.
    """
    made: list[Branch] = []
    for step in steps_of(branch):
        operands = [~child if child < 0 else made[child] for child in step]
        sums = [one for one in operands if not isinstance(one, int)]
        terms = tuple(one for one in operands if isinstance(one, int))
        if len(operands) > 2 and len(sums) == 1 and len(terms) > 1:
            made.append((sums[0], terms))
        else:
            made.append(tuple(operands))
    return made[-1] if made else branch


def as_tree(branch: Branch) -> Tree:
    """Return an order as the record that pictures are drawn from."""
    steps = steps_of(branch)
    terms = 1 + max((~child for step in steps for child in step if child < 0), default=0)
    return Tree("sum", terms, gather_steps(branch))


def is_drawable(branch: Branch | None) -> bool:
    """Return whether every term up to the last is in the order once, as a picture needs it."""
    if branch is None or isinstance(branch, int):
        return False
    terms = [~child for step in steps_of(branch) for child in step if child < 0]
    return sorted(terms) == list(range(len(terms)))


def describe_order(branch: Branch) -> str:
    """Return an order in words, such as `4 × (16 fused in one addition), then folded`."""
    return str(as_tree(branch))


def draw_expressions(target: TargetReport, numbers: dict[str, int]) -> str:
    """Draw the orders of a target's expressions, a picture each; "" if none is one sum."""
    chosen = [at for at, one in enumerate(target.classes) if is_drawable(one.tree)][:PICTURES]
    trees = [as_tree(target.classes[at].tree or 0) for at in chosen]
    if not trees:
        return ""
    made = [set(step_digests(steps_of(tree.branch))) for tree in trees]
    pictures = [
        OrderPicture(tree, [other for other in made if other is not made[at]])
        for at, tree in enumerate(trees)
    ]
    panels = []
    for place, tree, picture in zip(chosen, trees, pictures, strict=True):
        one = target.classes[place]
        head = f"{letter(numbers[one.digest])}: {describe_class(one, target)}"
        panels.append(_panel(head, tree, picture))
    return "".join(panels)


def _panel(head: str, tree: Tree, picture: OrderPicture) -> str:
    """Return one order as a picture of its own, so that narrow pages put it below the others."""
    whole, height = Canvas(), picture.height + HEAD
    whole.panel(1, 1, WIDTH, height)
    whole.text(13, 21, _cut(head, 70), "title")
    whole.text(13, 38, _cut(str(tree), WORDS_A_LINE))
    whole.place(picture.canvas, 1, 1 + HEAD)
    drawn = whole.document(WIDTH + 2, height + 2).replace(f"<style>{STYLE}</style>", "")
    named = f'role="img" aria-label="{escape(f"{head}: {tree}")}"'
    drawn = drawn.replace('role="img"', named, 1)
    return f'<div class="wide">{drawn}</div>'


def undrawn(target: TargetReport) -> Sequence[int]:
    """Return the expressions that have no picture."""
    drawn = [at for at, one in enumerate(target.classes) if is_drawable(one.tree)][:PICTURES]
    return [at for at in range(len(target.classes)) if at not in drawn]


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "…"
