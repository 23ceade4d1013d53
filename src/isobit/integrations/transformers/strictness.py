"""Strict mode: watch the operators of new kinds of call, and raise if a stock operator added numbers."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from isobit.errors import UnsupportedError
from isobit.foundation.machine import flushes_subnormals
from isobit.integrations.transformers import operator_table
from isobit.integrations.transformers.operator_table import (
    BROADCAST,
    REASONS,
    UNKNOWN,
    Reason,
    Use,
    find_reason,
    is_our_node,
    words,
)
from isobit.integrations.transformers.refusals import refuse, refuse_flushing
from isobit.integrations.transformers.structure import is_hooked
from isobit.ops import dispatch

# Inspect the autograd graph before backward: nodes that add in an unknown order, and gradients that autograd adds.

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
    found_reason = None if plain else reason_of_node(name)
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


def reason_of_node(name: str) -> Reason | None:
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


# Record which operators ran, and which of them are not isobit's and add numbers.

__all__ = ["Coverage", "Observer", "Use", "observe", "walk_gradients"]


@dataclass(frozen=True)
class Coverage:
    """The operators that ran, forward and backward, and the gradients that autograd adds."""

    operators: tuple[Use, ...]
    gradients: tuple[Use, ...] = ()

    @property
    def order_dependent(self) -> tuple[Use, ...]:
        """The operators that add in an order of their own, the most frequent first."""
        found = [use for use in (*self.operators, *self.gradients) if use.reason]
        return tuple(sorted(found, key=lambda use: (-use.count, use.operator)))

    @property
    def kept(self) -> bool:
        """True if operators ran and none of them adds in an order of its own."""
        return bool(self.operators) and not self.order_dependent

    def __str__(self) -> str:
        calls = sum(use.count for use in self.operators)
        seen = f"{len({use.operator for use in self.operators})} operators in {calls} calls"
        if not self.order_dependent:
            return f"{seen}: none carries an order of its own" if self.operators else "nothing ran"
        found = self.order_dependent
        return f"{seen}; {len(found)} carry an order of their own\n{table(found)}"


def table(uses: Sequence[Use]) -> str:
    """Format as aligned columns: operator, calls, reason, remedy."""
    rows = [("operator", "calls", "why", "instead")]
    rows += [(use.operator, str(use.count), use.reason, use.remedy) for use in uses]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:<{wide[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count every operator that torch dispatches while it is open: below autograd, composites decomposed.

    Operators called inside an operator, and inside compiled code, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[tuple[str, Reason | None]] = Counter()

    def __enter__(self) -> Observer:
        dispatch.has_native()  # kernels are attested by calls of operators, which are not the caller's
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decompose composite operators, which torch does not do under inference_mode."""
        named = kwargs or {}
        if func.namespace == "aten" and torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        self.note(func, args, named)
        return func(*args, **named)

    def note(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Count a call before it runs, because it may write to its arguments."""
        self._calls[func._schema.name, find_reason(func, args, named)] += 1

    def coverage(self, gradients: Iterable[Use] = ()) -> Coverage:
        """Return what was recorded until now, sorted by name."""
        uses = [
            Use(
                name,
                count,
                *(() if found_reason is None else (found_reason.reason, found_reason.remedy)),
            )
            for (name, found_reason), count in self._calls.items()
        ]
        return Coverage(
            tuple(sorted(uses, key=lambda use: (use.operator, use.reason))), tuple(gradients)
        )


def observe() -> Observer:
    """Return a recorder of operators; open it with `with`, then call its `coverage()`."""
    return Observer()


# Detect what strict mode could not see: hooks that run in backward, and tensors handed to NumPy.

LATER = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
OUTSIDE = frozenset(("numpy", "__array__", "__dlpack__"))


class Escapes(TorchFunctionMode):
    """Raise at the call itself, so that the traceback shows the hook that made it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LATER and args and isinstance(args[0], Tensor):
            refuse(
                "no tensor hook inside the model in strict mode: it runs in backward, where operators are not watched",
                f"Tensor.{name}",
                "change gradients after backward, or pass strict=False to isobit.enable",
            )
        if name in OUTSIDE and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            refuse(
                "computations by torch inside the model in strict mode: what NumPy adds is not seen",
                f"Tensor.{name} of a floating tensor",
                "compute with operators of isobit, or pass strict=False to isobit.enable",
            )
        return func(*args, **(kwargs or {}))


Output = TypeVar("Output")


class Strictness:
    """The kinds of call of one model that were watched."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.watched: set[tuple[Any, ...]] = set()

    def forget(self) -> None:
        """Watch every kind again, because changed modules or hooks may run other operators."""
        self.watched.clear()

    def run(self, model: nn.Module, kind: tuple[Any, ...], call: Callable[[], Output]) -> Output:
        """Run a call; watch it if its kind is new, and raise if a stock operator added numbers."""
        if not self.wanted or kind in self.watched:
            return call()
        if flushes_subnormals(workers=True):
            refuse_flushing("threads of torch's pool that replace them by zero")
        seen = Placing(model)
        with seen, Escapes():
            output = call()
        # A gradient of before is added to the sum of this call's, not among them: it is not looked at.
        outputs = [t for t in tensors_of(output) if t.grad_fn is not None]
        graph = walk_gradients(outputs, held=False, known=unhooked_modules(model))
        found = seen.coverage(graph)
        if not found.kept:
            raise_for_stock_sums(found, seen)
        self.watched.add(kind)
        return output


class Placing(Observer):  # type: ignore[no-untyped-call]
    """An observer that records in which module an operator ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}

    def note(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Record a call, and the module in which an operator that adds ran first."""
        name = func._schema.name
        if name not in self.places and find_reason(func, args, named) is not None:
            self.places[name] = self._running()
        super().note(func, args, named)

    def _running(self) -> str:
        """Return the innermost module that is being called, from the stack: hooks would affect other threads."""
        frame = inspect.currentframe()
        while frame is not None:
            if (
                frame.f_code.co_name == "_call_impl"
                and id(frame.f_locals.get("self")) in self._names
            ):
                return str(self._names[id(frame.f_locals["self"])])
            frame = frame.f_back
        return ""


def unhooked_modules(model: nn.Module) -> set[nn.Module]:
    """Return modules without hooks inside: recomputed in backward, they run what was watched in forward."""
    return {
        module
        for module in model.modules()
        if not any(is_hooked(part) for part in module.modules())
    }


def raise_for_stock_sums(found: Coverage, seen: Placing) -> None:
    """Raise with the operator, the module and the remedy."""
    if not found.order_dependent:
        raise UnsupportedError(
            expected="operators that run",
            received="none was seen",
            remedy="enable(model, strict=False) to go on",
        )
    first = next(
        (use for use in found.order_dependent if use.operator in seen.places),
        found.order_dependent[0],
    )
    place = seen.places.get(first.operator)
    where = (
        f" in {place or type(seen._model).__name__}"
        if place is not None
        else " in the gradient's graph"
    )
    more = f", and {len(found.order_dependent) - 1} more" if len(found.order_dependent) > 1 else ""
    raise UnsupportedError(
        expected="no stock operator that carries an order of its own",
        received=f"{first.operator}{where}: {first.reason}{more}",
        remedy=f"{first.remedy}; isobit.coverage_report(model, batch) lists all, enable(model, strict=False) goes on",
    )


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)


def coverage_report(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any] | Tensor
) -> Coverage:
    """List every operator that runs in a forward and backward pass of a module, enabled or not.

    Args:
        model: A transformers model, or any module.
        batch: The module's keyword arguments, its positional arguments, or its one tensor. A transformers model is
            called with use_cache=False, and with its input_ids as labels if there are none.

    Returns:
        The operators, and what the autograd graph adds. Backward starts from the loss, or from a gradient of ones for
        each tensor of the output. Gradients that parameters hold are kept.

    Example:
        >>> print(isobit.coverage_report(torch.nn.Linear(4, 2), torch.ones(3, 4)).kept)
        False
        >>> print(isobit.coverage_report(isobit.nn.Linear(4, 2), torch.ones(3, 4)).kept)
        True
    """
    named = dict(batch) if isinstance(batch, Mapping) else {}
    placed = (
        ()
        if isinstance(batch, Mapping)
        else (batch,)
        if isinstance(batch, Tensor)
        else tuple(batch)
    )
    if hasattr(model, "config") and "input_ids" in named:
        named = {"use_cache": False, "labels": named["input_ids"], **named}
    with without_gradients(model), torch.enable_grad(), observe() as seen:
        output = model(*placed, **named)
        loss = getattr(output, "loss", None)
        found = [t for t in tensors_of(output if loss is None else loss) if t.grad_fn is not None]
        gradients = walk_gradients(found, known=unhooked_modules(model))
        if found:
            torch.autograd.backward(found, [torch.ones_like(t) for t in found])
    return seen.coverage(gradients)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Set gradients aside for the block, and put them back."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
