"""Where events go: Python's logging, JSON lines, TensorBoard, Weights & Biases, MLflow, OpenTelemetry, Prometheus.

A sink imports its package when it is created, and nothing else does. Any object with `log(dict, step)` or
`log_metrics(dict, step)` is a sink too. Metrics are called `isobit/<name>` there, and a finding is the metric
`isobit/findings/<rule>`, with its value or 1.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO

from isobit.errors import ArgumentError
from isobit.guards.live.events import LOGGER, Event

__all__ = [
    "JsonLines",
    "Logging",
    "MLflow",
    "OpenTelemetry",
    "Prometheus",
    "TensorBoard",
    "Tracker",
    "WeightsAndBiases",
]
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
METRIC_LEVEL = logging.DEBUG  # a run has several per step


def __dir__() -> list[str]:
    return __all__


def load(package: str, distribution: str) -> Any:
    """Import an optional package.

    Raises:
        ArgumentError: If it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ArgumentError(
            expected=f"the package {package}",
            received=f"an error on import: {error}",
            remedy=f"pip install {distribution}",
        ) from error


def values_of(event: Event) -> dict[str, float]:
    """Return an event as names and numbers, for trackers that know nothing else."""
    name = f"isobit/findings/{event.name}" if event.kind == "finding" else f"isobit/{event.name}"
    if event.module and event.kind == "metric":
        name += f"/{event.module}"
    return {name: 1.0 if event.value is None else event.value}


class Logging:
    """Python's logging: findings by their severity, metrics at DEBUG. The default.

    A record has the event as `record.event`, so that a formatter can write its fields.

    Args:
        logger: None is the logger `isobit.guards`.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.logger = LOGGER if logger is None else logger

    def emit(self, event: Event) -> None:
        """Log one event."""
        level = LEVELS[event.severity] if event.kind == "finding" else METRIC_LEVEL
        if self.logger.isEnabledFor(level):
            self.logger.log(level, "%s", event, extra={"event": event})

    def close(self) -> None:
        """Do nothing: the logger belongs to the program."""


class JsonLines:
    """A file with one JSON object per event, which `isobit runlog` reads.

    Args:
        path: Appended to. Ranks need a file each.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.file: TextIO | None = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def emit(self, event: Event) -> None:
        """Write one line. It is on disk when the process is killed, not when the machine is."""
        if self.file is None:
            raise ValueError(f"{self.path} is closed")
        self.file.write(json.dumps(event.as_dict(), ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
        self.file = None


class Tracker:
    """Any object with `log_metrics(dict, step=)` or `log(dict, step=)`.

    Args:
        tracker: For example a run of Weights & Biases or Trackio, an Accelerator, a Lightning logger.
    """

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        metrics = getattr(tracker, "log_metrics", None)
        self.log: Callable[..., object] = metrics if callable(metrics) else tracker.log

    def emit(self, event: Event) -> None:
        """Log one event as a number."""
        self.log(values_of(event), step=event.step)

    def close(self) -> None:
        """Do nothing: the tracker belongs to the program."""


class TensorBoard:
    """TensorBoard: metrics as scalars, findings as text.

    Args:
        writer: A SummaryWriter, or a folder for a new one.
    """

    def __init__(self, writer: Any) -> None:
        self.owned = not hasattr(writer, "add_scalar")
        if self.owned:
            load("tensorboard", "tensorboard")
            writer = import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(writer))
        self.writer = writer

    def emit(self, event: Event) -> None:
        """Add one event."""
        for name, value in values_of(event).items():
            self.writer.add_scalar(name, value, event.step)
        if event.kind == "finding":
            self.writer.add_text("isobit/findings", str(event), event.step)

    def close(self) -> None:
        """Write what is buffered; close a writer that was created here."""
        if self.owned:
            self.writer.close()
        else:
            self.writer.flush()


class WeightsAndBiases:
    """Weights & Biases: metrics as numbers; findings as numbers, and in words in the run's summary.

    Args:
        run: A run of `wandb.init`; None starts one.
        options: Of `wandb.init`, such as project= and mode="offline".
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self.owned = run is None
        self.run = load("wandb", "wandb").init(**options) if run is None else run
        self.count = 0

    def emit(self, event: Event) -> None:
        """Log one event."""
        self.run.log(values_of(event), step=event.step)
        if event.kind == "finding":
            self.run.summary[f"isobit/finding {self.count}"] = str(event)
            self.count += 1

    def close(self) -> None:
        """Finish a run that was started here."""
        if self.owned:
            self.run.finish()


class MLflow:
    """MLflow: metrics as metrics; findings as metrics, and in words as tags of the run.

    Args:
        run_id: A run; None is the active one, or a new one.
        tracking_uri: Of the server or the database; None is MLflow's own setting.
        experiment: The experiment of a new run.
    """

    def __init__(
        self,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        experiment: str = "isobit",
    ) -> None:
        mlflow = load("mlflow", "mlflow")
        self.client = mlflow.MlflowClient(tracking_uri)
        active = mlflow.active_run() if run_id is None else None
        self.run_id, self.count = active.info.run_id if active else run_id, 0
        if self.run_id is None:
            known = self.client.get_experiment_by_name(experiment)
            parent = known.experiment_id if known else self.client.create_experiment(experiment)
            self.run_id = self.client.create_run(parent).info.run_id

    def emit(self, event: Event) -> None:
        """Log one event."""
        for name, value in values_of(event).items():
            self.client.log_metric(self.run_id, name, value, step=event.step or 0)
        if event.kind == "finding":
            self.client.set_tag(self.run_id, f"isobit.finding.{self.count}", str(event)[:5000])
            self.count += 1

    def close(self) -> None:
        """Do nothing: metrics are sent one by one, and the run belongs to the program."""


class OpenTelemetry:
    """OpenTelemetry's API: gauges `isobit.<metric>`, a counter `isobit.findings`, and a span per finding.

    Without an SDK that the program has set up, the API does nothing. Spans of findings are children of one span
    `isobit.run`, which ends with `close`.

    Args:
        meter_provider: None is the global one.
        tracer_provider: None is the global one.
    """

    def __init__(self, meter_provider: Any = None, tracer_provider: Any = None) -> None:
        metrics = load("opentelemetry.metrics", "opentelemetry-api")
        self.trace = load("opentelemetry.trace", "opentelemetry-api")
        self.meter = metrics.get_meter("isobit", meter_provider=meter_provider)
        self.tracer = self.trace.get_tracer("isobit", tracer_provider=tracer_provider)
        self.gauges: dict[str, Any] = {}
        self.findings = self.meter.create_counter("isobit.findings", description="findings by rule")
        self.span: Any = None

    def emit(self, event: Event) -> None:
        """Set a gauge, or count a finding and record it as a span."""
        labels = {"run": event.run, "rank": event.rank}
        if event.kind == "metric":
            name = f"isobit.{event.name}"
            if name not in self.gauges:
                self.gauges[name] = self.meter.create_gauge(name)
            self.gauges[name].set(event.value, labels | {"module": event.module})
            return
        self.findings.add(1, labels | {"rule": event.name, "module": event.module})
        if self.span is None:
            self.span = self.tracer.start_span("isobit.run", attributes=labels)
        fields = {f"isobit.{name}": value for name, value in event.as_dict().items()}
        inside = self.trace.set_span_in_context(self.span)
        self.tracer.start_span(
            f"isobit.finding {event.name}", context=inside, attributes=fields
        ).end()

    def close(self) -> None:
        """End the span of the run."""
        if self.span is not None:
            self.span.end()
        self.span = None


class Prometheus:
    """Prometheus: gauges `isobit_<metric>`, a counter `isobit_findings_total`, and the time of the last step.

    An alert on a run that hangs: `time() - isobit_last_step_timestamp_seconds > 600`.

    Args:
        port: Serve `/metrics` at this port; 0 picks a free one, which is then `self.port`. None serves nothing.
        registry: A CollectorRegistry; None is a new one, `self.registry`.
        address: Where to serve; the default is this machine only.
    """

    def __init__(
        self, port: int | None = None, registry: Any = None, address: str = "127.0.0.1"
    ) -> None:
        self.client = load("prometheus_client", "prometheus-client")
        self.registry = self.client.CollectorRegistry() if registry is None else registry
        self.labels = ("run", "rank")
        self.gauges: dict[str, Any] = {}
        names = ("isobit_findings", "findings by rule", (*self.labels, "rule", "severity"))
        self.findings = self.client.Counter(*names, registry=self.registry)
        self.last = self.gauge("last_step_timestamp_seconds")
        self.port, self.server = port, None
        if port is not None:
            self.server, _ = self.client.start_http_server(port, address, self.registry)
            self.port = self.server.server_port

    def gauge(self, name: str) -> Any:
        """Return the gauge of a metric."""
        if name not in self.gauges:
            shown = "isobit_" + "".join(c if c.isalnum() else "_" for c in name)
            self.gauges[name] = self.client.Gauge(shown, name, self.labels, registry=self.registry)
        return self.gauges[name]

    def emit(self, event: Event) -> None:
        """Set a gauge, or count a finding."""
        labels = (event.run, str(event.rank))
        if event.kind == "finding":
            self.findings.labels(*labels, event.name, event.severity).inc()
        elif not event.module:  # a series per module would be too many
            self.gauge(event.name).labels(*labels).set(event.value)
        if event.step is not None:
            self.last.labels(*labels).set(event.time)

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
        self.server = None
