"""What chain-v1 claims: the gate over a tiny model of each family, and planted wrong operators inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.gates.model import fixture
from isobit.gates.model.gate import Report, run_gate
from isobit.gates.model.models import build_model
from isobit.gates.model.scorers import Ordered, Stock
from isobit.integrations.transformers import head, modules
from isobit.integrations.transformers.enabling import enabled as scope

FAMILIES = ("qwen3-tiny", "qwen2-tiny", "llama-tiny")
SELECTED = "log-probability"
Subject = Callable[[Tensor, str], Report]


def enabled(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """The gate on an enabled model of the dtype that was drawn."""
    return run_enabled(name, drawn.dtype)


@lru_cache(maxsize=8)  # two claims ask for the same gate
def run_enabled(name: str, dtype: torch.dtype) -> Report:
    model = build_model(name, dtype)
    with scope(model, strict=False), torch.enable_grad():
        return run_gate(Ordered(model), fixture.draw_samples(model.config.vocab_size))


def stock(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """The same gate on the model as it is."""
    model = build_model(name, drawn.dtype)
    with torch.enable_grad():
        return run_gate(Stock(model), fixture.draw_samples(model.config.vocab_size))


def selected(subject: Subject, case: Case, tally: Tally) -> None:
    """Log-probabilities, in every layout."""
    count(subject, case, tally, lambda quantity: quantity == SELECTED)


def trained(subject: Subject, case: Case, tally: Tally) -> None:
    """Loss, gradients and weights after a step."""
    count(subject, case, tally, lambda quantity: quantity != SELECTED)


def count(subject: Subject, case: Case, tally: Tally, wanted: Callable[[str], bool]) -> None:
    """The rows of a report, into a tally."""
    for name in FAMILIES:
        if tally.differing:
            return
        report = subject(case.arguments["drawn"], name)
        rows = [row for row in report.rows if wanted(row.quantity)]
        tally.count(sum(fixture.LENGTHS))
        if not rows or report.trained != report.parameters:
            tally.fail(
                f"{name}: {len(rows)} rows, {report.trained} of {report.parameters} parameters with gradients"
            )
        for row in rows:
            tally.compared += row.numbers
            if not row.kept:
                tally.fail(f"{name}, {row.quantity}, {row.layout}: {row.where}", max(row.differ, 1))


# ---- planted --------------------------------------------------------------------------------------------


@contextmanager
def planted(home: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """One operator replaced, and put back."""
    right = getattr(home, name)
    setattr(home, name, partial(wrong, right))
    try:
        yield
    finally:
        setattr(home, name, right)


def with_stock_linear(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """Output and down projections by stock."""

    def wrong(_: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, **__: Any) -> Tensor:
        return F.linear(x, weight, bias)

    with planted(modules, "linear", wrong):
        return run_enabled.__wrapped__(name, drawn.dtype)


def with_keys_of_padding(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """Attention over a whole row of the batch, padding included."""

    def wrong(
        right: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        queries: Any = None,
        keys: Any = None,
        **how: Any,
    ) -> Any:
        return right(q, k, v, **how)

    with planted(modules, "attention", wrong):
        return run_enabled.__wrapped__(name, drawn.dtype)


def with_positions_of_padding(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """Rotary angles by the place in the row, padding counted."""

    def wrong(right: Any, module: Any, x: Tensor, places: Tensor) -> Any:
        return right(module, x, torch.arange(x.shape[1])[None])

    with planted(modules, "forward_rotary", wrong):
        return run_enabled.__wrapped__(name, drawn.dtype)


def with_padded_dgamma(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """A norm's gradient over the padded batch."""

    def wrong(
        right: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        samples: Any = None,
        heads: bool = False,
    ) -> Any:
        return right(x, weight, eps, heads=heads)

    with planted(modules, "rms_norm", wrong):
        return run_enabled.__wrapped__(name, drawn.dtype)


def with_stock_norm(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """A norm by stock."""

    def wrong(_: Any, x: Tensor, weight: Tensor, eps: float, **__: Any) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    with planted(modules, "rms_norm", wrong):
        return run_enabled.__wrapped__(name, drawn.dtype)


def with_stock_loss(drawn: Tensor, name: str = FAMILIES[0]) -> Report:
    """Logits, then a mean, by stock."""

    def wrong(_: Any, hidden: Tensor, weight: Tensor, targets: Tensor, **__: Any) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, -2), targets.flatten())

    with planted(head, "linear_cross_entropy", wrong):
        return run_enabled.__wrapped__(name, drawn.dtype)
