"""Orders of addition in a certificate: as words, and as pictures side by side with what they share in one colour."""

from __future__ import annotations

from collections.abc import Sequence

from isobit.certify_records import TargetReport
from isobit.order.addition import Branch, step_digests, steps_of
from isobit.report.certify_words import describe_class, letter
from isobit.report.markup import escape
from isobit.report.order_picture import WIDTH, OrderPicture
from isobit.report.svg import STYLE, Canvas
from isobit.reveal.tree import Tree

GAP, HEAD = 16, 50
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


def draw_expressions(target: TargetReport) -> str:
    """Draw the orders of a target's expressions in panels; "" if none is one sum."""
    chosen = [at for at, one in enumerate(target.classes) if is_drawable(one.tree)][:PICTURES]
    trees = [as_tree(target.classes[at].tree or 0) for at in chosen]
    if not trees:
        return ""
    made = [set(step_digests(steps_of(tree.branch))) for tree in trees]
    pictures = [
        OrderPicture(tree, [other for other in made if other is not made[at]])
        for at, tree in enumerate(trees)
    ]
    columns = 1 if len(pictures) == 1 else 2
    whole, y = Canvas(), 6.0
    for at in range(0, len(pictures), columns):
        row = pictures[at : at + columns]
        height = max(one.height for one in row) + HEAD
        for column, picture in enumerate(row):
            x = 4 + column * (WIDTH + GAP)
            place = chosen[at + column]
            head = f"{letter(place)}: {describe_class(target.classes[place], target)}"
            whole.panel(x, y, WIDTH, height)
            whole.text(x + 12, y + 20, _cut(head, 70), "title")
            whole.text(x + 12, y + 37, _cut(str(trees[at + column]), WORDS_A_LINE))
            whole.place(picture.canvas, x, y + height - picture.height)
        y += height + GAP
    drawn = whole.document(8 + columns * WIDTH + (columns - 1) * GAP, y)
    words = "; ".join(f"{letter(place)}: {tree}" for place, tree in zip(chosen, trees, strict=True))
    return drawn.replace(f"<style>{STYLE}</style>", "").replace(
        'role="img"', f'role="img" aria-label="{escape(words)}"', 1
    )


def undrawn(target: TargetReport) -> Sequence[int]:
    """Return the expressions that have no picture."""
    drawn = [at for at, one in enumerate(target.classes) if is_drawable(one.tree)][:PICTURES]
    return [at for at in range(len(target.classes)) if at not in drawn]


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "…"
