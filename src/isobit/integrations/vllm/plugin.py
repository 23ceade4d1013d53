"""The entry point of the group `vllm.general_plugins`, which vLLM loads in each of its processes.

It changes no result. It makes the attention backend known under the name ISOBIT and the backend of weight transfers
under isobit. It refuses a configuration or a request that isobit's worker could not serve when it arrives, before the
worker has to end because of it. All concern only engines whose configuration names them or isobit's worker; see [Note:
what switches isobit on] in enabling.py.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from isobit.errors import ArgumentError
from isobit.integrations.vllm.package import library
from isobit.integrations.vllm.refusals import WORKER, check_dtype, check_engine, check_request

BACKEND = "isobit.integrations.vllm.attention.OrderedAttentionBackend"
TRANSFER = ("isobit", "isobit.integrations.vllm.transfer", "CheckedTransfer")
MARK = "_isobit_checks"  # on functions of vLLM that were wrapped here
_registering = threading.Lock()


def register() -> None:
    """Register what vLLM's processes need to know; calling it again changes nothing."""
    with _registering:
        registry = library("v1.attention.backends.registry")
        if "ISOBIT" not in registry.AttentionBackendEnum.__members__:
            registry.register_backend("ISOBIT", BACKEND)
        transfers = library("distributed.weight_transfer").WeightTransferEngineFactory
        if TRANSFER[0] not in transfers._registry:
            transfers.register_engine(*TRANSFER)
        rejected = library("exceptions").VLLMValidationError
        check_requests(library("v1.engine.input_processor").InputProcessor, rejected)
        check_configurations(library("engine.arg_utils").EngineArgs)


def check_requests(processor: Any, rejected: type[Exception]) -> None:
    """Check the sampling options of requests to engines with isobit's worker.

    Args:
        processor: vLLM's class of input processors.
        rejected: vLLM's error for a wrong request. A server answers it with 400 and its words, and any other with 500
            and none.
    """
    validate = processor._validate_params
    if getattr(validate, MARK, False):
        return

    @functools.wraps(validate)
    def validate_params(self: Any, params: Any, *given: Any, **named: Any) -> Any:
        found = validate(self, params, *given, **named)
        if self.vllm_config.parallel_config.worker_cls == WORKER and hasattr(params, "temperature"):
            try:
                check_request(params)  # pooling has no temperature, and no engine of ours serves it
            except ArgumentError as error:
                raise rejected(str(error)) from error
        return found

    setattr(validate_params, MARK, True)
    processor._validate_params = validate_params


def check_configurations(arguments: Any) -> None:
    """Check engines with isobit's worker where they are configured, before vLLM starts a process for them."""
    create = arguments.create_engine_config
    if getattr(create, MARK, False):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *given: Any, **named: Any) -> Any:
        config = create(self, *given, **named)
        if config.parallel_config.worker_cls == WORKER:
            check_engine(config)
            check_dtype(self.dtype, config.model_config)
        return config

    setattr(create_engine_config, MARK, True)
    arguments.create_engine_config = create_engine_config
