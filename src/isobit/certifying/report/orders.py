"""Orders of addition in a certificate: as words, and as pictures side by side with what they share in one colour."""

from __future__ import annotations

from collections.abc import Sequence

from isobit.certifying.records import TargetReport
from isobit.certifying.report.words import describe_class, letter
from isobit.order.addition import Branch, step_digests, steps_of
from isobit.report.markup import STYLE, Canvas, escape
from isobit.reveal.report import WIDTH, OrderPicture
from isobit.reveal.tree import Tree

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
