"""Planted operators that depend on the number of threads, on chance, or on how often they were called."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isobit.auditing.records import ERROR, RANDOM
from isobit.library.audit.plants import products
from isobit.library.audit.plants.layers import halved
from isobit.library.audit.plants.plant import (
    WIDTH,
    Net,
    Plant,
    hidden,
    operator,
    planted_in_net,
    rows_by_outputs,
)
from isobit.library.audit.plants.products import chained, row_sum

_calls = itertools.count()


@operator("thread_split", rows_by_outputs)
def thread_split(x: Tensor, weight: Tensor) -> Tensor:
    """Give each thread a part of K."""
    return products.in_parts(products.terms_of(x, weight), torch.get_num_threads())


@operator("lost_thread", rows_by_outputs)
def lost_thread(x: Tensor, weight: Tensor) -> Tensor:
    """Lose the last terms where threads do not divide their number evenly: K is 31 here."""
    terms = products.terms_of(x, weight)[..., 1:]
    return products.chain(
        terms[..., : terms.shape[-1] // torch.get_num_threads() * torch.get_num_threads()]
    )


def all_threads(x: Tensor, weight: Tensor) -> Tensor:
    """Add what `lost_thread` should add."""
    return products.chain(products.terms_of(x, weight)[..., 1:])


@operator("atomics")
def atomics(x: Tensor) -> Tensor:
    """Add each row in the order in which terms happen to arrive."""
    return x - products.shuffled(x, next(_calls))[..., None]


@operator("autotuned", rows_by_outputs)
def autotuned(x: Tensor, weight: Tensor) -> Tensor:
    """Try two kernels in turn."""
    terms = products.terms_of(x, weight)
    return products.chain(terms) if next(_calls) % 2 else products.pairwise(terms)


@operator("lost_update")
def lost_update(x: Tensor) -> Tensor:
    """Lose one term of each row now and then, as an unguarded sum of several threads does."""
    lost = next(_calls) % x.shape[-1]
    kept = torch.cat([x[..., :lost], x[..., lost + 1 :]], -1)
    return x - products.chain(kept)[..., None]


@operator("stochastic_rounding")
def stochastic_rounding(x: Tensor) -> Tensor:
    """Round to bf16, up or down by chance."""
    down = x.bfloat16().to(x.dtype)
    return torch.where(torch.rand_like(x) < 0.5, down, down + (x - down) * 2)


def noisy(x: Tensor) -> Tensor:
    """Add noise, as routers do in training."""
    return x + torch.randn_like(x)


class LeftOn(nn.Module):
    """A dropout that stays on in eval mode."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, training=self.active)


def with_dropout(faulty: bool) -> nn.Module:
    """Return a model whose dropout was left on."""
    return Net(LeftOn(faulty))


WEIGHT = (24, WIDTH)
PLANTS: tuple[Plant, ...] = (
    planted_in_net("thread_split", thread_split, chained, weight=WEIGHT, axis="threads"),
    planted_in_net(
        "lost_thread", lost_thread, all_threads, weight=WEIGHT, axis="threads", kind=ERROR
    ),
    planted_in_net("atomics", atomics, row_sum, axis="repeat"),
    planted_in_net("autotuned", autotuned, chained, weight=WEIGHT, axis="repeat"),
    planted_in_net("lost_update", lost_update, row_sum, axis="repeat", kind=ERROR),
    planted_in_net("stochastic_rounding", stochastic_rounding, halved, axis="repeat", kind=RANDOM),
    planted_in_net("noisy", noisy, halved, operator="aten::randn_like", axis="repeat", kind=RANDOM),
    Plant(
        "dropout", with_dropout, hidden, "aten::bernoulli_", "layers.1", axis="repeat", kind=RANDOM
    ),
)
