"""Claims of chain-v1: the model gate over a tiny model of each family; planted wrong operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.gates.model import batch_layouts
from isobit.gates.model.batch_layout_gate import GateReport, run_gate
from isobit.gates.model.batch_layouts import IsobitScorer, StockScorer
from isobit.gates.model.models import build_model
from isobit.integrations.transformers import head
from isobit.integrations.transformers.enabling import enabled as scope
from isobit.integrations.transformers.parts import attention, layers, linear, rotary
from isobit.library import stock as stock_functions
from isobit.library.claims import replaced
from isobit.ops.attention.op import Places

FAMILIES = ("qwen3-tiny", "qwen2-tiny", "llama-tiny")
SELECTED = "log-probability"
Subject = Callable[[Tensor, str], GateReport]


def enabled(drawn: Tensor, name: str = FAMILIES[0]) -> GateReport:
    """Return the gate's report on an enabled model of the dtype of `drawn`."""
    return run_enabled(name, drawn.dtype)


@lru_cache(maxsize=8)  # two claims need the same gate
def run_enabled(name: str, dtype: torch.dtype) -> GateReport:
    """Return the gate's report on an enabled model."""
    model = build_model(name, dtype)
    with scope(model, strict=False), torch.enable_grad():
        return run_gate(IsobitScorer(model), batch_layouts.draw_samples(model.config.vocab_size))


def stock(drawn: Tensor, name: str = FAMILIES[0]) -> GateReport:
    """Return the gate's report on the stock model."""
    model = build_model(name, drawn.dtype)
    with torch.enable_grad():
        return run_gate(StockScorer(model), batch_layouts.draw_samples(model.config.vocab_size))


def selected(subject: Subject, case: Case, tally: Tally) -> None:
    """Log-probabilities agree in every layout."""
    count(subject, case, tally, lambda quantity: quantity == SELECTED)


def trained(subject: Subject, case: Case, tally: Tally) -> None:
    """Loss, gradients and weights after a step agree in every layout."""
    count(subject, case, tally, lambda quantity: quantity != SELECTED)


def count(subject: Subject, case: Case, tally: Tally, wanted: Callable[[str], bool]) -> None:
    """Count the rows of each family's report."""
    for name in FAMILIES:
        if tally.differing:
            return
        report = subject(case.arguments["drawn"], name)
        rows = [row for row in report.rows if wanted(row.quantity)]
        tally.count(sum(batch_layouts.LENGTHS))
        if not rows or report.trained != report.parameters:
            trained = f"{report.trained} of {report.parameters} parameters with gradients"
            tally.fail(f"{name}: {len(rows)} rows, {trained}")
        for row in rows:
            tally.compared += row.numbers
            if not row.kept:
                tally.fail(f"{name}, {row.quantity}, {row.layout}: {row.where}", max(row.differ, 1))


# ---- planted --------------------------------------------------------------------------------------------


def gate_with(home: Any, name: str, wrong: Callable[..., Any]) -> Subject:
    """Return the gate with one operator replaced by `wrong(right, ...)`."""

    def run(drawn: Tensor, family: str = FAMILIES[0]) -> GateReport:
        with replaced(home, name, partial(wrong, getattr(home, name))):
            return run_enabled.__wrapped__(family, drawn.dtype)

    run.__name__ = f"with{wrong.__name__}"
    return run


def _stock_linear(_: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *__: Any) -> Any:
    """Compute output and down projections by stock."""
    return stock_functions.linear(x, weight, bias)


def _keys_of_padding(right: Any, _: Any, *tensors: Tensor, **how: Any) -> Any:
    """Attend over a whole row of the batch, padding included."""
    return right(lambda q, k: Places(q, k, None, None), *tensors, **how)


def _positions_of_padding(right: Any, module: Any, x: Tensor, places: Tensor) -> Any:
    """Take rotary angles by the place in the row, padding counted."""
    return right(module, x, torch.arange(x.shape[1])[None])


def _padded_dgamma(right: Any, x: Tensor, weight: Tensor, eps: float, **named: Any) -> Any:
    """Sum a norm's gradient over the padded batch."""
    return right(x, weight, eps, heads=named.get("heads", False))


def _stock_norm(_: Any, x: Tensor, weight: Tensor, eps: float, **__: Any) -> Tensor:
    return stock_functions.rms_norm(x, weight, eps)


def _stock_loss(_: Any, hidden: Tensor, weight: Tensor, targets: Tensor, **__: Any) -> Tensor:
    """Compute logits, then a mean, by stock."""
    logits = stock_functions.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


with_stock_linear = gate_with(linear, "linear_with_packed", _stock_linear)
with_keys_of_padding = gate_with(attention, "attention_in", _keys_of_padding)
with_positions_of_padding = gate_with(rotary, "forward_rotary", _positions_of_padding)
with_padded_dgamma = gate_with(layers, "rms_norm", _padded_dgamma)
with_stock_norm = gate_with(layers, "rms_norm", _stock_norm)
with_stock_loss = gate_with(head, "linear_cross_entropy", _stock_loss)
