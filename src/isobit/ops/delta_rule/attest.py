"""Compare an executor's delta rule with the portable one, bit for bit, on hard inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, special_values, wide_values
from isobit.ops.delta_rule import gates, portable

# Two heads read one head of keys; a row of values is a vector and a tail.
KEY_HEADS, HEADS, KEY, VALUE = 1, 2, 3, 18
# The samples: a chunk and two rows of the next, one row, none. Numbers of 16 bits are widened first, then it is fp32.
LENGTHS, SHORT = (66, 1, 0), (4, 1, 0)


def inputs(dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, g and beta: decays from none to those that leave nothing, and values of many sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        found = torch.rand(rows, *shape, generator=generator, dtype=torch.float32, device="cpu")
        return found * 2 - 1

    q, k = draw(KEY_HEADS, KEY), draw(KEY_HEADS, KEY) * 0.6
    v = wide_values((rows, HEADS, VALUE), dtype, generator)
    g = -((draw(HEADS) + 1) ** 8) * 0.3
    beta = (draw(HEADS) + 1) / 2
    return q.to(dtype), k.to(dtype), v, g.to(dtype), beta.to(dtype)


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    lengths = LENGTHS if dtype == torch.float32 else SHORT
    first, rows = lengths[0], sum(lengths)
    given = inputs(dtype, rows)
    places = [(0, first), (first, 1), (rows, 0)]
    spans = torch.tensor(places, device="cpu")
    whole = portable.delta_rule(*given, places, None, [])[0]
    if not bits.equal(call("delta_rule", *given, spans, None, [])[0], whole):
        return "delta_rule"
    # In two calls: the second begins in an open chunk, and fills it where there is more than one.
    begun, later = [(0, first - 3), (first, 1), (rows, 0)], [(first - 3, 3), (rows, 0), (rows, 0)]
    empty = torch.zeros(
        3, portable.sizes_of(given[0], given[2]).packed, dtype=torch.float32, device="cpu"
    )
    expected = portable.delta_rule(*given, begun, empty, [0, 0, 0])
    found = call("delta_rule", *given, torch.tensor(begun, device="cpu"), empty, [0, 0, 0])
    if not all(bits.equal(a, b) for a, b in zip(found, expected, strict=True)):
        return "delta_rule's state"
    counts = [first - 3, 1, 0]
    rest = call("delta_rule", *given, torch.tensor(later, device="cpu"), found[1], counts)[0]
    if not bits.equal(rest[first - 3 : first], whole[first - 3 : first]):
        return "delta_rule behind a state"
    grad = wide_values(tuple(given[2].shape), dtype, torch.Generator().manual_seed(1))
    wanted = portable.delta_rule_backward(grad, *given, places)
    made = call("delta_rule_backward", grad, *given, spans)
    names = ("q", "k", "v", "g", "beta")
    for name, a, b in zip(names, made, wanted, strict=True):
        if not bits.equal(a, b):
            return f"delta_rule's gradient of {name}"
    return None


def difference_on_gpu(dtype: torch.dtype, call: Call) -> str | None:
    """Return what differs first, or None: of the gates too, which have one executor on the CPU."""
    generator = torch.Generator().manual_seed(2)
    a, grad = (special_values((2, 81), dtype, generator) for _ in range(2))
    log_rate, bias = (wide_values((81,), dtype, generator) for _ in range(2))
    calls = (
        ("sigmoid_gate", (a,)),
        ("sigmoid_gate_backward", (grad, a)),
        ("decay_gate", (a, log_rate, bias, None, 0)),
    )
    for name, given in calls:
        wanted = getattr(gates, f"portable_{name}")(*given)
        if not bits.equal(call(name, *given), wanted):
            return name
    finite = wide_values((2, 81), dtype, generator)  # terms are sums' operands: their NaN is any
    made = call("decay_gate_backward", finite, finite, log_rate, bias)
    wanted = gates.portable_decay_gate_backward(finite, finite, log_rate, bias)
    if not all(bits.equal(x, y) for x, y in zip(made, wanted, strict=True)):
        return "decay_gate's gradient"
    return difference(dtype, call)
