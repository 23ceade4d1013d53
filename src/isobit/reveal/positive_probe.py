"""Find the tree of a sum whose terms cannot be negative (squares, exponentials), one triple of terms at a time.

With one big term at c and 3/8 of its last place at a and at b, each of the two alone is rounded away; together they
round it up. So the result shows whether a and b are added before c is, and such triples determine the tree. Terms are
inserted one by one. The places of the last ones predict the next (kernels are regular), and two triples confirm it;
otherwise a binary search finds it.
"""

from __future__ import annotations

from random import Random

from isobit.errors import RevealError
from isobit.order.addition import Branch
from isobit.reveal.target import Session, Terms

# A binary tree of additions that grows term by term, for probes that insert one term at a time.


class Part:
    """A subtree of the terms inserted so far."""

    def __init__(self, left: Part | None, right: Part | None, term: int) -> None:
        """Make a leaf of a term (no children), or an addition."""
        self.left, self.right = left, right
        self.term = term  # any term of it
        self.last: int = term if left is None or right is None else max(left.last, right.last)
        self.size: int = 1 if left is None or right is None else left.size + right.size
        self.parent: Part | None = None


class GrowingTree:
    """The tree of the terms inserted so far; the last insertions can be undone."""

    def __init__(self, n: int) -> None:
        """Start with the terms 0 and 1 of n."""
        self.leaves = [Part(None, None, term) for term in range(n)]
        self.root = _join(self.leaves[0], self.leaves[1])

    def insert(self, at: Part, term: int) -> list[tuple[Part, int]]:
        """Add a term on the edge above `at`; return the sums above with their last terms before."""
        above = at.parent
        part = _join(at, self.leaves[term])
        part.parent = above
        if above is None:
            self.root = part
        elif above.left is at:
            above.left = part
        else:
            above.right = part
        before = []
        while above is not None:
            before.append((above, above.last))
            above.size += 1
            above.last = max(above.last, term)
            above = above.parent
        return before

    def remove(self, at: Part, before: list[tuple[Part, int]]) -> None:
        """Undo the last insertion above `at`."""
        part = at.parent
        assert part is not None
        above = at.parent = part.parent
        if above is None:
            self.root = at
        elif above.left is part:
            above.left = at
        else:
            above.right = at
        for node, last in before:
            node.size -= 1
            node.last = last


def _join(left: Part, right: Part) -> Part:
    part = Part(left, right, left.term)
    left.parent = right.parent = part
    return part


def stride_back(tree: GrowingTree, stride: int, term: int) -> Part | None:
    """Return the topmost sum whose last term is `stride` before the term."""
    if stride > term or stride < 1:
        return None
    at = tree.leaves[term - stride]
    while at.parent is not None and at.parent.last == at.last:
        at = at.parent
    return at


def holds(top: Part, below: Part) -> bool:
    """Return whether `below` is in the subtree `top`."""
    part: Part | None = below
    while part is not None and part is not top:
        part = part.parent
    return part is top


def halfway(top: Part, floor: Part | None) -> Part | None:
    """Return an addition between `floor` and `top` that halves the open part; None if only the edge above is open."""
    if top.left is None:
        return None
    if floor is None:
        part = top
        while True:
            assert part.left is not None
            assert part.right is not None
            child = part.left if part.left.size >= part.right.size else part.right
            if 2 * child.size <= top.size or child.left is None:
                return part
            part = child
    # The path from `floor` up to `top`: the middle of it by terms.
    path = []
    part = floor
    while part is not top:
        assert part.parent is not None
        part = part.parent
        path.append(part)
    if not path:
        return None
    wanted = (top.size + floor.size) / 2
    return min(path, key=lambda p: abs(p.size - wanted))


def nest(root: Part) -> Branch:
    """Return the tree as nested tuples, without recursion."""
    done: list[Branch] = []
    work: list[tuple[Part, bool]] = [(root, False)]
    while work:
        part, ready = work.pop()
        if part.left is None or part.right is None:
            done.append(part.term)
        elif ready:
            done[-2:] = [(done[-2], done[-1])]
        else:
            work += [(part, True), (part.right, False), (part.left, False)]
    return done[0]


def ancestors(part: Part | None) -> list[Part]:
    """Return the part and everything above it."""
    found = []
    while part is not None:
        found.append(part)
        part = part.parent
    return found


CHECKED_TRIPLES = 64
MOST_AHEAD = 64
LAST_PLACE = 2.0**-23  # of fp32 numbers from 1 to 2
# Numbers from 1 to 2: squares of short ones first, whose roots are exact.
LARGE = tuple((1.0 + step / 64) ** 2 for step in range(22)) + tuple(
    1.0 + step / 32 for step in range(1, 27)
)


class _Triples:
    """Probes triples, after a check that the answer shows in the result."""

    def __init__(self, session: Session) -> None:
        self.session = session
        n = session.target.n
        ends = sorted({(0, n - 1), (n - 1, 0), (0, n // 2), (n // 2, 0)} - {(0, 0)})
        # What follows the sum may hide its last place at some values. Then others are tried, and with them a ballast
        # whose last place is finer than the small terms.
        for self.ballast in (0.0, (3 / 8) ** 2)[: 1 if n < 4 else 2]:
            for self.one in LARGE:
                alone = self._ask([self._terms(c) for c, _ in ends])
                lost = self._ask([self._terms(c, (a, 0.3 * LAST_PLACE)) for c, a in ends])
                kept = self._ask([self._terms(c, (a, 0.75 * LAST_PLACE)) for c, a in ends])
                self.nothing = alone[0]
                if set(alone) != {self.nothing} or set(lost) != {self.nothing}:
                    raise RevealError(
                        expected="a sum of positive terms kept in fp32: a term absorbs 0.3 of its last place",
                        received=f"{alone[0]!r} alone and {lost[0]!r} with it, from {session.target.name}",
                        remedy="it is not such a sum, or its accumulator is wider than what can be read",
                    )
                if self.nothing not in kept:
                    return
        raise RevealError(
            expected="a result that shows the last place of its sum",
            received=f"{self.nothing!r} with and without it, from {session.target.name}",
            remedy="the output is narrower than the sum, and hides its order: read it in fp32",
        )

    def _terms(self, c: int, *small: tuple[int, float]) -> Terms:
        indices, values = (
            (c, *(term for term, _ in small)),
            (self.one, *(value for _, value in small)),
        )
        if not self.ballast:
            return Terms(indices, values)
        spare = next(term for term in range(4) if term not in indices)
        return Terms((*indices, spare), (*values, self.ballast))

    def _ask(self, batch: list[Terms]) -> list[float]:
        return self.session.ask(batch, "order")

    def meet_before(self, *triples: tuple[int, int, int]) -> list[bool]:
        """Return for each (a, b, c) whether a and b are added before c."""
        half = 0.375 * LAST_PLACE
        batch = [self._terms(c, (a, half), (b, half)) for a, b, c in triples]
        return [value != self.nothing for value in self._ask(batch)]


def find_tree(session: Session) -> Branch:
    """Find the tree; it is exact if the target is a tree of additions of two terms."""
    n = session.target.n
    if n < 3:
        return (0, 1) if n == 2 else 0  # there is only one order
    triples = _Triples(session)
    tree = GrowingTree(n)
    strides, ahead, term = [1], 1, 2
    while term < n:
        placed = _place_ahead(triples, tree, strides[0], range(term, min(term + ahead, n)))
        term += placed
        if placed == ahead:
            ahead = min(2 * ahead, MOST_AHEAD)
        elif term < n:
            ahead = 1
            at = _predicted(triples, tree, strides, term) or _search(triples, tree.root, term)
            stride = term - at.last
            strides = [stride, *(s for s in strides if s != stride)][:3]
            tree.insert(at, term)
            term += 1
        if session.progress is not None:
            session.progress("order", term, n)
    branch = nest(tree.root)
    _check_additions(triples, tree.root)
    _check(triples, tree.leaves)
    return branch


def _place_ahead(triples: _Triples, tree: GrowingTree, stride: int, terms: range) -> int:
    """Insert terms where the stride predicts, probe all at once, remove all from the first wrong one on."""
    placed, asked = [], []
    for term in terms:
        at = stride_back(tree, stride, term)
        if at is None:
            break
        asked.append(_questions(at, term))
        placed.append((at, tree.insert(at, term)))
    answers = iter(triples.meet_before(*(question for group in asked for question in group)))
    right = [[next(answers) for _ in group] for group in asked]
    good = next((at for at, met in enumerate(right) if not all(met)), len(right))
    for at, before in reversed(placed[good:]):
        tree.remove(at, before)
    return good


def _predicted(triples: _Triples, tree: GrowingTree, strides: list[int], term: int) -> Part | None:
    """Return the place that one of the last strides predicts, if triples confirm it."""
    for stride in strides:
        at = stride_back(tree, stride, term)
        if at is not None and all(triples.meet_before(*_questions(at, term))):
            return at
    return None


def _questions(at: Part, term: int) -> list[tuple[int, int, int]]:
    """Return triples that all hold only if the term is added to `at`: outside its operands, inside its parent."""
    asked = []
    if at.left is not None and at.right is not None:
        asked.append((at.left.term, at.right.term, term))
    if at.parent is not None:
        other = at.parent.right if at.parent.left is at else at.parent.left
        assert other is not None
        asked.append((at.term, term, other.term))
    return asked


def _search(triples: _Triples, root: Part, term: int) -> Part:
    """Find the subtree that the term is added to, by binary search."""
    top = root  # the term is inside this subtree or on the edge above it
    floor: Part | None = None  # and not inside this one, which is below it
    while True:
        middle = halfway(top, floor)
        if middle is None:
            return top
        left, right = middle.left, middle.right
        assert left is not None
        assert right is not None
        outside, inside_left, inside_right = triples.meet_before(
            (left.term, right.term, term),
            (left.term, term, right.term),
            (right.term, term, left.term),
        )
        if outside + inside_left + inside_right != 1:
            raise RevealError(
                expected=f"one pair of the terms {left.term}, {right.term}, {term} to meet before the third",
                received=f"{outside + inside_left + inside_right} pairs that do, from {triples.session.target.name}",
                remedy="it is not a tree of additions of two terms, so it has no order to reveal",
            )
        if outside:
            if middle is top:
                return top
            floor = middle
        else:
            top = left if inside_left else right
            if floor is not None and top is floor:
                return top
            if floor is not None and not holds(top, floor):
                floor = None


def _check_additions(triples: _Triples, root: Part) -> None:
    """Check that each addition is of two numbers in fp32: a fused or wider one would keep more."""
    asked, work = [], [root]
    while work:
        part = work.pop()
        if part.left is None or part.right is None:
            continue
        work += [part.left, part.right]
        if part.parent is not None:
            other = part.parent.right if part.parent.left is part else part.parent.left
            assert other is not None
            asked.append((part.left.term, other.term, part.right.term))
    keep_more = sum(triples.meet_before(*asked))
    if keep_more:
        raise RevealError(
            expected="additions of two numbers, each rounded to fp32",
            received=f"{keep_more} that keep more, from {triples.session.target.name}",
            remedy="it is not a tree of additions of two terms in fp32, so it has no order to reveal",
        )


def _check(triples: _Triples, leaves: list[Part]) -> None:
    """Check random triples against the tree."""
    random = Random(len(leaves))
    for _ in range(CHECKED_TRIPLES):
        a, b, c = random.sample(range(len(leaves)), 3)
        above = {id(part) for part in ancestors(leaves[a])}
        with_b = next(part for part in ancestors(leaves[b]) if id(part) in above)
        with_c = next(part for part in ancestors(leaves[c]) if id(part) in above)
        wanted = with_b.size < with_c.size
        if triples.meet_before((a, b, c)) != [wanted]:
            raise RevealError(
                expected=f"terms {a} and {b} to meet {'' if wanted else 'not '}before {c}, as other triples imply",
                received=f"the opposite from {triples.session.target.name}",
                remedy="it is not a tree of additions of its terms, so it has no order to reveal",
            )
