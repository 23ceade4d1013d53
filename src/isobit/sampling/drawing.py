"""`sample`: one token per row of logits, drawn by a key, with the log-probability under the policy that drew it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from blake3 import blake3
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.softmax.op import softmax
from isobit.sampling.support import (
    MASS,
    Number,
    check_temperature,
    keep_most_likely,
    support_ids,
    wrong,
)

# Random numbers that are a function of (seed, request, position): integer arithmetic, no generator, no state.
#
# [Note: the key of a draw] The numbers of a key are hashed one after the other by splitmix64's finaliser, whose
# products wrap around in int64 as they do in uint64. So a draw is the same in any batch, on any device, and when
# generation is resumed; requests that are drawn at the same time share nothing.

# splitmix64's constants, as int64
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

Whole = int | Sequence[int] | Tensor


def uniform(seed: Whole, requests: Whole, positions: Whole, rows: int) -> Tensor:
    """Return one number in [0, 1) per row, a multiple of 2^-53 in fp64; see [Note: the key of a draw].

    Args:
        seed: One for all rows, or one per row.
        requests: The number of each row's request.
        positions: The position in its request of the token that is drawn.
        rows: The number of rows.

    Returns:
        Tensor [rows] in fp64, on the CPU.
    """
    key = torch.full((rows,), GOLDEN, dtype=torch.int64)
    for name, part in (("seed", seed), ("requests", requests), ("positions", positions)):
        key = mix((key ^ per_row(name, part, rows)) + GOLDEN)
    return shift_right(key, 11).double() * 2.0**-53


def per_row(name: str, value: Whole, rows: int) -> Tensor:
    """Return a key's part as int64 [rows], modulo 2^64."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        found = value.reshape(-1).to("cpu", torch.int64) if whole else None
    else:
        given = list(value) if isinstance(value, Sequence) else [value]
        whole = all(hasattr(one, "__index__") and not isinstance(one, bool) for one in given)
        numbers = [as_int64(index(one)) for one in given] if whole else []
        found = torch.tensor(numbers, dtype=torch.int64)
    if found is None or not whole or len(found) not in (1, rows):
        raise ArgumentError(
            expected=f"{name}: a whole number, or one for each of {rows} rows",
            received=f"{type(value).__name__} of {0 if found is None else len(found)} whole numbers",
            remedy="pass integers; isobit.sampling.request_number makes one of a request's name",
        )
    return found.expand(rows)


def mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64, where products wrap around."""
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def as_int64(value: int) -> int:
    """Convert to int64 modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


def request_number(name: str) -> int:
    """Return the number of a request that has a name: 63 bits of its BLAKE3 digest.

    Args:
        name: The request's id, such as vLLM's `request_id`.

    Returns:
        A whole number from 0 to 2^63 - 1.

    Example:
        >>> isobit.sampling.request_number("request-7") == isobit.sampling.request_number("request-7")
        True
    """
    return int.from_bytes(blake3(name.encode()).digest(8), "little") >> 1


@dataclass(frozen=True)
class Drawn:
    """What `sample` drew.

    Attributes:
        tokens: Token ids, [rows].
        logprobs: log p of each token under the policy that drew it, [rows] in fp32: of the logits divided by the
            temperature, normalised over the tokens that were kept. 0 where the temperature is 0.
        kept: Which tokens could be drawn, [rows, vocabulary].

    Example:
        >>> drawn = isobit.sampling.sample(
        ...     torch.tensor([[0.0, 2.0, 1.0]]), seed=0, requests=0, positions=0, temperature=0.0
        ... )
        >>> drawn.tokens, drawn.support
        (tensor([1]), tensor([[1]]))
    """

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor

    @property
    def support(self) -> Tensor:
        """The ids that could be drawn, filled up with -1: `support=` of isobit.logprobs."""
        return support_ids(self.kept)


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    seed: Whole,
    requests: Whole,
    positions: Whole,
    temperature: Number = 1.0,
    top_k: Number = None,
    top_p: Number = None,
) -> Drawn:
    """Draw a token per row by (seed, request, position): a row's draw does not depend on the batch.

    A trainer that scores these tokens with the same temperature and `support=` has the same log-probabilities, bit for
    bit. Ties are broken by the lowest id, in greedy decoding and in top-k and top-p; see [Note: ties] in support.py.

    Args:
        logits: Shape [rows, vocabulary] in fp32, as the head summed them; -inf for a token that may not be drawn.
        seed: One for all rows, or one per row.
        requests: The number of each row's request.
        positions: The position in its request of the token that is drawn: the number of tokens before it.
        temperature: Divides the logits; 0 takes the most likely token. One for all, or one per row.
        top_k: Keep the k most likely tokens; None, 0 or -1 for all. One for all, or one per row.
        top_p: Keep the most likely tokens whose probabilities reach p; None or 1 for all. One for all, or one per row.

    Returns:
        Tokens, their log-probabilities and what was kept.

    Raises:
        ArgumentError: If logits are not fp32 or a row has no number that is finite, or an option is out of range.

    Example:
        >>> logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
        >>> asked = dict(seed=7, temperature=0.8, top_p=0.9)
        >>> whole = isobit.sampling.sample(logits, requests=[4, 5, 6], positions=[9, 2, 2], **asked)
        >>> alone = isobit.sampling.sample(logits[1:2], requests=5, positions=2, **asked)
        >>> torch.equal(whole.tokens[1:2], alone.tokens), torch.equal(whole.logprobs[1:2], alone.logprobs)
        (True, True)
    """
    check_logits(logits)
    rows = len(logits)
    heat = per_row_temperature(temperature, rows).to(logits.device)
    greedy = heat == 0
    scaled = divide_by_temperature(logits, torch.where(greedy, 1.0, heat))
    kept = keep_most_likely(scaled, top_k, top_p)
    if bool(greedy.any()):
        kept &= ~greedy.unsqueeze(1) | only_first_of_largest(scaled)
    allowed = torch.where(kept, scaled, -torch.inf)
    number = uniform(seed, requests, positions, rows).to(logits.device)
    tokens = draw_by_mass(softmax(allowed), number)
    logprobs = log_softmax(allowed).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Drawn(tokens, logprobs, kept)


def divide_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits [rows, V] · (1 / temperature [rows]) in fp32: the arithmetic of isobit.linear_logprob."""
    return logits * (1.0 / temperature).unsqueeze(1)


def draw_by_mass(probabilities: Tensor, number: Tensor) -> Tensor:
    """Return the token whose share of [0, 1) has the number, with shares by ascending id.

    Probabilities are counted in whole multiples of 2^-40, whose sums have no order. A token below that is not drawn.
    """
    edges = (probabilities * float(MASS)).long().cumsum(-1)
    total = edges[:, -1:]
    at = (number.unsqueeze(1) * total.double()).long()
    return torch.searchsorted(edges, torch.minimum(at, total - 1), right=True).squeeze(1)


def only_first_of_largest(logits: Tensor) -> Tensor:
    """Return True at the largest of each row, at the lowest id of equal ones."""
    largest = logits == logits.amax(-1, keepdim=True)
    return largest & (largest.cumsum(-1) == 1)


def per_row_temperature(temperature: Number, rows: int) -> Tensor:
    """Return temperatures [rows] in fp32."""
    found = torch.as_tensor(temperature, dtype=torch.float32).reshape(-1).cpu()
    if len(found) not in (1, rows):
        raise wrong(f"temperature: one, or one for each of {rows} rows", temperature)
    check_temperature(found)
    return found.expand(rows)


def check_logits(logits: Tensor) -> None:
    """Raise unless each row has fp32 logits of which one is finite and none is NaN or +inf."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ArgumentError(
            expected="logits [rows, vocabulary] in fp32, as the head summed them",
            received=f"{list(logits.shape)} in {logits.dtype}",
            remedy="take the head's sums before they are rounded; logits[:, -1] of an enabled model are",
        )
    wrong_rows = ~logits.amax(-1).isfinite()  # the maximum of a row with a NaN is NaN
    if bool(wrong_rows.any()):
        at = int(wrong_rows.nonzero()[0])
        raise ArgumentError(
            expected="a finite logit in every row, and neither NaN nor +inf",
            received=f"row {at}: largest {float(logits[at].amax())}, {int(logits[at].isnan().sum())} NaN",
            remedy="look for the first module with a NaN: the model is broken before the sampler",
        )
