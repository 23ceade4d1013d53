"""Inspect the autograd graph before backward: nodes that add in an unknown order, and gradients that autograd adds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from isobit.integrations.transformers import operator_table
from isobit.integrations.transformers.operator_table import (
    BROADCAST,
    REASONS,
    UNKNOWN,
    Reason,
    Use,
    words,
)
from isobit.integrations.transformers.own_operators import is_our_node

SEVERAL_GRADIENTS = Reason(
    "autograd adds more than two gradients in the order of its graph",
    "one operator that owns the sum, as isobit.linear_group for linears that share an input",
)
RECOMPUTED = Reason(
    "runs again in backward what is not watched there: hooks, or more than a layer",
    "gradient_checkpointing_kwargs={'use_reentrant': False}, or remove the hooks of the layers",
)
# Backward nodes, as autograd names them without "Backward0", that move or scale gradients and add nothing.
FREE = words(
    "View UnsafeView ReshapeAlias Reshape Transpose T Permute Slice Select Unsqueeze Squeeze Split SplitWithSizes "
    "Unbind Narrow Alias Clone Copy ToCopy Contiguous Cat Stack Flip Roll Detach MaskedSelect Sum Mean Neg "
    "Sqrt Rsqrt Exp Log Tanh Sin Cos Relu Abs Add Sub Rsub Mul Div Where MaskedFill Clamp ClampMin ClampMax Maximum "
    "Minimum Square Reciprocal Amax Amin Max Min Topk Sort Logsumexp CopyBackwards Diagonal Tril Triu ConstantPadNd "
    "Fill Zero Lerp Addcmul Addcdiv"
)
BROADCASTING = words(
    "Add Sub Rsub Mul Div Where MaskedFill Maximum Minimum Clamp ClampMin ClampMax Addcmul Addcdiv Lerp Pow"
)
# Whose gradient adds, though the operator itself does not.
ADDING = {
    **dict.fromkeys(
        words("Embedding Index IndexSelect Gather Take IndexPut"), operator_table.SCATTER
    ),
    **dict.fromkeys(words("Expand Repeat RepeatInterleave"), BROADCAST),
}


def walk_gradients(
    output: Tensor | Sequence[Tensor], *, held: bool = True, known: Collection[nn.Module] = ()
) -> list[Use]:
    """List what the backward pass of `output` adds in an unknown order; empty if there is nothing.

    Call it after the forward pass and before the backward pass.

    Args:
        output: The tensors that backward starts from.
        held: Also count gradients that parameters hold already.
        known: Modules that a reentrant checkpoint may call again: their graph is made in backward.
    """
    outputs = [output] if isinstance(output, Tensor) else list(output)
    found: Counter[tuple[str, Reason]] = Counter()
    users: dict[tuple[Any, int], list[Any]] = {}
    for node in nodes_below([t.grad_fn for t in outputs if t.grad_fn is not None]):
        for found_reason in () if recomputed_module(node) in known else reasons_of(node):
            found[name_of(node), found_reason] += 1
        for below, at in node.next_functions:
            if below is not None:
                users.setdefault((below, at), []).append(node)
    for (node, _), by in users.items():
        before = held and is_leaf(node) and node.variable.grad is not None  # one more to add
        edges = len(by)
        if edges + before > 2:
            edges = count_edges(by)
        if edges + before > 2:
            found[describe(node, edges + before), SEVERAL_GRADIENTS] += 1
    return [
        Use(name, count, c.reason, c.remedy)
        for (name, c), count in sorted(found.items(), key=lambda f: f[0][0])
    ]


def count_edges(nodes: Sequence[Any]) -> int:
    """Count the gradients of a value; slices of one axis that do not overlap count as one.

    Each element of the value is in one of them, so that all but one of the terms of its sum are zeros.
    """
    slices = [cut for cut in map(slice_of, nodes) if cut is not None]
    others = len(nodes) - len(slices)
    slices.sort()
    apart = len({cut[0] for cut in slices}) == 1 and all(
        first[2] <= second[1] for first, second in pairwise(slices)
    )
    return others + (1 if apart else len(slices))


def slice_of(node: Any) -> tuple[int, int, int] | None:
    """Return axis, start and end of a node that takes a contiguous slice; None for other nodes."""
    if name_of(node) != "Slice" or node._saved_step != 1:
        return None
    sizes = node._saved_self_sym_sizes
    axis = signed(node._saved_dim) % len(sizes)
    size = int(sizes[axis])
    saved = (node._saved_start, 0), (node._saved_end, size)
    places = (signed(default if at is None else int(at)) for at, default in saved)
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in places)
    return axis, start, end


def signed(number: int) -> int:
    """Return an index that autograd saved as an unsigned number of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def nodes_below(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield every node once, without recursion, because graphs are deep."""
    seen: set[Any] = set()
    queue = list(roots)
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue += [below for below, _ in node.next_functions if below is not None]


def reasons_of(node: Any) -> Iterator[Reason]:
    """Yield why this node adds: because of its operator, or of a value that was broadcast."""
    name = name_of(node)
    if is_leaf(node) or is_our_node(node):
        return
    plain = name == "Pow" and getattr(node, "_saved_exponent", None) in operator_table.EXACT_POWERS
    found_reason = None if plain else find_reason(name)
    if found_reason is not None:
        yield found_reason
    elif name in BROADCASTING:
        size = size_of(node, 0)
        if any(
            below is not None and size_of(below, at) < size for below, at in node.next_functions
        ):
            yield BROADCAST


def recomputed_module(node: Any) -> nn.Module | None:
    """Return the module that a reentrant checkpoint recomputes in backward."""
    if getattr(node, "_forward_cls", None) is not CheckpointFunction:
        return None
    call = getattr(
        node.run_function, "func", node.run_function
    )  # a partial that holds the keywords
    return call.__self__ if getattr(call, "__func__", None) is nn.Module.__call__ else None


def find_reason(name: str) -> Reason | None:
    """Look the node up by name. An unknown node counts as one that adds."""
    if name in FREE:
        return None
    if name in ADDING:
        return ADDING[name]
    if name == CheckpointFunction.__name__:
        return RECOMPUTED
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    for candidate in (snake, f"_{snake}"):
        if candidate in REASONS:
            return REASONS[candidate]
    return operator_table.ATTENTION if "DotProduct" in name else UNKNOWN


def name_of(node: Any) -> str:
    """Return the operator's name: the node's without `Backward` and its number."""
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def is_leaf(node: Any) -> bool:
    return name_of(node) == "AccumulateGrad"


def size_of(node: Any, at: int) -> int:
    """Return the number of elements of a node's output."""
    return int(
        node.variable.numel() if is_leaf(node) else math.prod(node._input_metadata[at].shape)
    )


def describe(node: Any, edges: int) -> str:
    """Describe a value by the node that computed it."""
    if is_leaf(node):
        return f"a parameter {list(node.variable.shape)} with {edges} gradients"
    return f"the output of {name_of(node)} with {edges} gradients"
