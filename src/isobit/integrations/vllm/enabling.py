"""`enable` and `disable`: engines of this process that are made from now on use isobit's worker.

[Note: what switches isobit on] The one switch is the name of the worker class in an engine's configuration, which vLLM
passes to every process it starts: `worker_cls="isobit.integrations.vllm.worker.Worker"`. The worker checks the
configuration, so an engine with it computes with isobit's operators or raises. `enable` fills that name in for engines
that this process makes; `vllm serve` has the option `--worker-cls`. The plugin (plugin.py), which vLLM loads in
each of its processes, changes no result: without the worker nothing of vLLM is different.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from isobit.integrations.vllm.package import library
from isobit.integrations.vllm.plugin import register
from isobit.integrations.vllm.refusals import LOGPROBS, WORKER, refuse

_changing = threading.RLock()
_stock: dict[str, Any] = {}  # what vLLM had, while it is replaced


def engine_arguments() -> dict[str, Any]:
    """Return the arguments that make an engine isobit's, for `vllm.LLM(...)` or `vllm.AsyncEngineArgs(...)`.

    Returns:
        The worker class, eager execution and the mode of log-probabilities.

    Example:
        >>> sorted(isobit.integrations.vllm.engine_arguments())
        ['enforce_eager', 'logprobs_mode', 'worker_cls']
    """
    return {"worker_cls": WORKER, "enforce_eager": True, "logprobs_mode": LOGPROBS}


def enable() -> None:
    """Make every vLLM engine that this process creates from now on compute with isobit's operators.

    For programs that make the engine themselves, such as trainers. Engines that exist are not changed. It is the
    same as passing `engine_arguments()` to each engine. Does nothing if it was called before.

    Raises:
        UnsupportedError: If vLLM is missing or of another version, or VLLM_PLUGINS leaves isobit out.

    Example:
        >>> isobit.integrations.vllm.enable()  # doctest: +SKIP
        >>> llm = vllm.LLM("Qwen/Qwen3-0.6B")  # doctest: +SKIP
    """
    arguments: Any = library("engine.arg_utils").EngineArgs
    check_plugins(library("envs").VLLM_PLUGINS)
    with _changing:
        register()
        if "create" in _stock:
            return
        create = _stock["create"] = arguments.create_engine_config

        @functools.wraps(create)
        def create_engine_config(self: Any, *given: Any, **named: Any) -> Any:
            if self.worker_cls not in ("auto", WORKER):
                refuse(
                    f"worker_cls={WORKER!r} while isobit is enabled",
                    f"worker_cls={self.worker_cls!r}",
                    "leave worker_cls out, or call isobit.integrations.vllm.disable() first",
                )
            if self.logprobs_mode not in ("raw_logprobs", LOGPROBS):  # the first is vLLM's default
                refuse(
                    f"logprobs_mode={LOGPROBS!r}",
                    f"logprobs_mode={self.logprobs_mode!r}",
                    "leave logprobs_mode out",
                )
            for name, value in engine_arguments().items():
                setattr(self, name, value)
            return create(self, *given, **named)

        arguments.create_engine_config = create_engine_config


def disable() -> None:
    """Put vLLM's own engine back for engines created from now on. Does nothing if isobit is not enabled.

    Example:
        >>> isobit.integrations.vllm.disable()
    """
    with _changing:
        if "create" in _stock:
            library("engine.arg_utils").EngineArgs.create_engine_config = _stock.pop("create")


def check_plugins(allowed: list[str] | None) -> None:
    """Raise if vLLM was told to load other plugins and not this one."""
    if allowed is not None and "isobit" not in allowed:
        refuse(
            "isobit among the plugins that vLLM may load",
            f"VLLM_PLUGINS={','.join(allowed)}",
            "add isobit to VLLM_PLUGINS, or unset it",
        )
