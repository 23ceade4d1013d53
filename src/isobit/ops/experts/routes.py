"""The routes of tokens to experts, and the rows that each expert has of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from isobit.errors import ArgumentError
from isobit.foundation import backends
from isobit.ops import dispatch
from isobit.ops.device_tables import refuse_in_capture, table_of
from isobit.ops.portable.samples import as_samples, check_rows, whole_samples
from isobit.order.samples import Samples

READ = "whose number of rows of each expert the host reads"
# (samples, expert_spans) of Routes.tokens; not an attribute of the tensor, which could then not be saved and loaded.
_spans: MutableMapping[Tensor, tuple[Samples, Tensor]] = WeakTensorKeyDictionary()


class Routes(NamedTuple):
    """Which experts each token goes to, with which weights, and where its rows are among the rows of all experts.

    Rows are in the order of the experts, and those of one expert in the order of the tokens. Padding is not routed: its
    slots have the expert `total`, the place -1 and the weight 0.

    Attributes:
        total: The number of experts.
        samples: The rows of each sample, of the tokens.
        experts: The expert of each slot, [T, k], int64.
        tokens: The token of each row, [R], int64.
        places: The row of each slot, [T, k], int64.
        rows: The number of rows of each expert.
        weights: The weight of each slot, [T, k].

    Example:
        >>> routes = isobit.route(torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 0.0]]), 2)
        >>> routes.experts.tolist(), routes.tokens.tolist(), routes.rows
        ([[2, 1], [0, 1]], [1, 0, 1, 0], (1, 2, 1))
    """

    total: int
    samples: Samples
    experts: Tensor
    tokens: Tensor
    places: Tensor
    rows: tuple[int, ...]
    weights: Tensor

    @classmethod
    def chosen(
        cls,
        experts: Tensor,
        weights: Tensor,
        *,
        total: int,
        samples: Samples | Tensor | None = None,
    ) -> Routes:
        """Return routes that are known already.

        Args:
            experts: The experts of each token, [..., k], int64; `total` for a slot that goes nowhere.
            weights: Their weights, [..., k].
            total: The number of experts.
            samples: The rows of each sample; see isobit.linear. Tokens outside of them must go nowhere.

        Returns:
            The routes.

        Raises:
            ArgumentError: If shapes do not fit, an expert does not exist or is named twice, or padding is routed.
            UnsupportedError: If a CUDA graph is being captured.

        Example:
            >>> ids, weights = torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]])
            >>> isobit.Routes.chosen(ids, weights, total=4).rows
            (1, 1, 0, 0)
        """
        if experts.dtype != torch.int64 or experts.dim() < 2 or experts.shape != weights.shape:
            raise ArgumentError(
                expected="experts as int64 [..., k] and weights of the same shape",
                received=f"{experts.dtype} of shape {list(experts.shape)}, weights {list(weights.shape)}",
                remedy="pass the experts and the weights of each token's slots, as isobit.route returns them",
            )
        known = as_samples(samples)
        if known is None:
            known = whole_samples(experts, None)
        check_rows(known, experts)
        refuse_in_capture(f"isobit.Routes.chosen, {READ}")
        flat = experts.reshape(-1, experts.shape[-1])
        check_experts(flat, total, known)
        return cls.planned(flat, weights.reshape(flat.shape), total, known)

    @classmethod
    def planned(cls, experts: Tensor, weights: Tensor, total: int, samples: Samples) -> Routes:
        """Return the routes of experts [T, k] that were checked, after finding their rows."""
        if experts.is_cpu and backends.chosen() is None and dispatch.is_native(torch.float32):
            tokens, places, counts = torch.ops.isobit.plan_routes(experts, total)
            return cls(total, samples, experts, tokens, places, tuple(counts.tolist()), weights)
        refuse_in_capture(f"isobit.route, {READ}")
        flat, slots = experts.reshape(-1), experts.shape[1]
        ordered, order = flat.sort(stable=True)
        tokens = order // slots
        bounds = bounds_of_spans(ordered * samples.rows + tokens, total, samples)
        has_spans = (
            torch.is_grad_enabled()
        )  # gradients need all of them, and a forward the first rows alone
        bounds = (bounds if has_spans else bounds[:, :1]).cpu()
        firsts = bounds[:, 0].tolist()
        order, tokens = order[: firsts[total]], tokens[: firsts[total]]
        if has_spans:
            _spans[tokens] = samples, spans_between(bounds)
        places = torch.full_like(flat, -1)
        places[order] = torch.arange(len(order), device=flat.device)
        rows = tuple(stop - first for first, stop in pairwise(firsts))
        return cls(total, samples, experts, tokens, places.view(experts.shape), rows, weights)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first row of each expert, and the one after its last."""
        found, at = [], 0
        for rows in self.rows:
            found.append((at, at + rows))
            at += rows
        return found


def expert_spans(tokens: Tensor, rows: tuple[int, ...], samples: Samples) -> Tensor:
    """Return [E, samples, 2]: the first row of each sample among the rows of an expert, and the number of its rows.

    It is on the CPU. The host waits for tokens that are on a GPU, unless `Routes.planned` returned them.

    Raises:
        UnsupportedError: If a CUDA graph is being captured.
    """
    refuse_in_capture(f"the gradient of grouped_linear, {READ}")
    known, spans = _spans.get(tokens, (None, None))
    if known is samples and spans is not None:
        return spans
    owner = torch.repeat_interleave(
        torch.arange(len(rows), device="cpu"), torch.tensor(rows, device="cpu")
    )
    return spans_between(bounds_of_spans(owner * samples.rows + tokens.cpu(), len(rows), samples))


def bounds_of_spans(keys: Tensor, total: int, samples: Samples) -> Tensor:
    """Return [total + 1, 1 + 2 * samples] from sorted keys [R], expert * samples.rows + token, of rows.

    For each expert, and for what is behind the last: its first row, then the first row of each sample that is not
    before it, and of each that is behind it.
    """
    spans = table_of(samples.spans, (-1, 2), keys.device)
    first = spans[:, 0]
    places = torch.cat((first.new_zeros(1), first, first + spans[:, 1]))
    base = torch.arange(total + 1, device=keys.device).unsqueeze(1) * samples.rows
    return torch.searchsorted(keys, base + places)


def spans_between(bounds: Tensor) -> Tensor:
    """Return the spans of `expert_spans` from bounds."""
    before, places = bounds[:-1, :1], bounds[:-1, 1:]
    samples = places.shape[1] // 2
    first, stop = places[:, :samples], places[:, samples:]
    return torch.stack((first - before, stop - first), -1)


def check_experts(experts: Tensor, count: int, samples: Samples) -> None:
    """Raise unless experts [T, k] exist, those of a token differ, and padding goes nowhere."""
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) <= count:
        raise ArgumentError(
            expected=f"experts from 0 to {count - 1}, or {count} for none",
            received=f"experts from {int(experts.min())} to {int(experts.max())}",
            remedy="pass total=, the number of experts",
        )
    ordered = experts.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < count)).any()):
        raise ArgumentError(
            expected="different experts for each token",
            received="a token with one expert in two slots",
            remedy="add the weights of the two slots, and leave one of them empty",
        )
    routed = (experts < count).any(1)
    for start, length in samples.spans:
        routed[start : start + length] = False
    if bool(routed.any()):
        raise ArgumentError(
            expected="padding that goes to no expert",
            received=f"row {int(routed.nonzero()[0])}, which is in no sample, with an expert",
            remedy=f"set the experts of padding to {count}; isobit.route(samples=) does",
        )
