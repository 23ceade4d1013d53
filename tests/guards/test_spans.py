"""Spans of a run are nested as asked, with OpenTelemetry's SDK in memory; hooks are removed."""

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

from isobit import ArgumentError
from isobit.guards import Spans


class Blocks(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.fails = fails

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.fails:
                raise KeyError
        return x


def record(depth, every=1, steps=3, micro=2, fails=False):
    """Return (name, module or micro-batch, name of the parent) of every span, in the order of their ends."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    model = Blocks(fails)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Spans(model, optimizer, depth=depth, every=every, tracer_provider=provider) as spans:
        for _ in range(steps):
            for _ in range(micro):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 4))  # no step
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)
    assert spans.open == []
    done = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in done}
    return [
        (
            span.name.removeprefix("isobit."),
            span.attributes.get("isobit.module", span.attributes.get("isobit.micro_batch")),
            names[span.parent.span_id].removeprefix("isobit.") if span.parent else None,
        )
        for span in done
    ]


def test_depths():
    steps = [("micro-batch", 0, "step"), ("micro-batch", 1, "step"), ("step", None, "run")]
    assert record("micro-batch") == [*steps * 3, ("run", None, None)]
    assert record("step") == [("step", None, "run")] * 3 + [("run", None, None)]
    assert record("micro-batch", every=2) == [*steps * 2, ("run", None, None)]


def test_blocks_and_operators():
    found = record("block", steps=1, micro=1)
    assert found[:2] == [("block", f"layers.{at}", "micro-batch") for at in (0, 1)]
    found = record("operator", steps=1, micro=1)
    assert found[:3] == [
        ("operator", "layers.0.0", "block"),
        ("operator", "layers.0.1", "block"),
        ("block", "layers.0", "micro-batch"),
    ]
    assert len(found) == 9


def test_wrong_arguments():
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in ({"depth": "kernel"}, {"depth": "run"}, {"every": 0}):
        with pytest.raises(ArgumentError):
            Spans(model, optimizer, **wrong)
    assert not model._forward_pre_hooks
    with pytest.raises(ArgumentError, match=r"a torch\.optim\.Optimizer"):
        Spans(model, "adam")
