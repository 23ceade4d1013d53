"""A binary tree of additions that grows term by term, for probes that insert one term at a time."""

from __future__ import annotations

from isobit.order.addition import Branch


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
