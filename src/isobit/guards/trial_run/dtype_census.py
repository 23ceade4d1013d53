"""Count in which dtypes the modules of a model ran, and compare that with what autocast was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isobit.guards.live.module_replay import tensors_in
from isobit.guards.trial_run.losses import LossCall
from isobit.guards.trial_run.report import Found, NotJudged

SENSITIVE = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Softmax, nn.LogSoftmax)
CONFIGURED = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


class DtypeCensus:
    """Output dtypes of the modules without submodules, in training.

    Attributes:
        calls: Calls by the module's class and dtype.
        asked: Devices and dtypes of autocast that were on when the program called a model.
        within: Dtypes of outputs of modules that have parameters.
        half: Classes of norms and softmaxes that returned float16.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.asked: set[tuple[str, torch.dtype]] = set()
        self.within: set[torch.dtype] = set()
        self.half: set[str] = set()

    def note(self, module: nn.Module, output: Any) -> None:
        """Count one call."""
        if module._modules:
            return
        dtypes = {tensor.dtype for tensor in tensors_in(output) if tensor.is_floating_point()}
        kind = type(module).__name__
        self.calls.update((kind, str(dtype).removeprefix("torch.")) for dtype in dtypes)
        if isinstance(module, SENSITIVE) and torch.float16 in dtypes:
            self.half.add(kind)
        if module._parameters:
            self.within |= dtypes

    def as_record(self) -> dict[str, dict[str, int]]:
        """Return calls by class and dtype, for reports."""
        found: dict[str, dict[str, int]] = {}
        for (kind, dtype), count in sorted(self.calls.items()):
            found.setdefault(kind, {})[dtype] = count
        return found


def asked_by(config: Mapping[str, Any]) -> tuple[str, torch.dtype] | None:
    """Return the dtype that a configuration asks for: `bf16: true`, or `bf16: {enabled: true}` of DeepSpeed."""
    for name, dtype in CONFIGURED.items():
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("enabled")
        if value is True:
            return name, dtype
    return None


def dtypes_are_as_asked(
    census: DtypeCensus, losses: list[LossCall], config: Mapping[str, Any]
) -> Iterator[Found]:
    """Yield findings where autocast had no effect, and where norms, softmaxes or losses ran in float16.

    Args:
        census: What ran.
        losses: The loss calls of the run.
        config: A configuration, which may ask for bf16 or fp16.

    Raises:
        NotJudged: If no module was seen.
    """
    if not census.calls:
        raise NotJudged("no module without submodules was called: a compiled model hides them")
    for device, dtype in sorted(census.asked, key=str):
        if dtype not in census.within:
            ran = ", ".join(sorted(map(str, census.within)))
            yield (
                "autocast-without-effect",
                "error",
                f"autocast({device!r}, {dtype}) was on, and no module with parameters returned {dtype}: they "
                f"returned {ran}",
            )
    wanted = asked_by(config)
    if wanted and str(wanted[1]).removeprefix("torch.") not in {d for _, d in census.calls}:
        yield (
            "autocast-without-effect",
            "error",
            f"the configuration has {wanted[0]}, and no module returned {wanted[1]}: they returned "
            + ", ".join(sorted({dtype for _, dtype in census.calls})),
        )
    named = {call.kind for call in losses if call.dtype == torch.float16 and not call.is_derived}
    own = {"the loss" for call in losses if call.dtype == torch.float16 and call.is_derived}
    half = sorted(census.half | named | own)
    if half:
        yield (
            "float16-reduction",
            "warning",
            f"{', '.join(half)} returned float16, whose largest number is 65504: run norms, softmax and loss in "
            "float32",
        )
