"""Which modules of PEFT are computed; the others raise an error that names them."""

from __future__ import annotations

from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.parts.part import plain_type

PLAIN = "a plain LoraConfig: LoRA, rsLoRA, several adapters, lora_bias, modules_to_save"
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # parameters of all experts, [E, …]
UNLOAD = "or merge the adapter and enable the result: isobit.enable(peft_model.merge_and_unload())"


def is_peft(module: nn.Module) -> bool:
    """Return whether a module's class, or one that it inherits from, is PEFT's."""
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def check_call(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise for arguments by which PEFT chooses adapters per row."""
    asked = [key for key, value in named.items() if value is not None]
    if given or asked:
        raise UnsupportedError(
            expected="the same adapters for all samples of a call",
            received=f"{', '.join(asked) or 'arguments'} of a PEFT model",
            remedy="call the model once for each adapter, after peft_model.set_adapter(name); PEFT leaves its hooks on "
            "the layers after an error, so load the model again",
        )


def is_of_parameter(module: Any) -> bool:
    """Return whether this is PEFT's wrapper of one parameter, which `target_parameters` makes."""
    kind = type(module)
    return kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "ParamWrapper"


def parameter_wrappers(module: Any) -> list[Any]:
    """Return PEFT's wrappers of the parameters of one module, which are around each other, from the outside."""
    found = []
    while is_of_parameter(module):
        found.append(module)
        module = module.base_layer
    return found


def check_wrapper(name: str, module: Any) -> None:
    """Raise unless a layer of PEFT is plain LoRA over torch.nn.Linear or experts, or a module to save."""
    kind = type(module)
    shown = f"{name} of type {kind.__module__}.{kind.__name__}"
    if kind.__name__ == "ModulesToSaveWrapper":
        return
    if is_of_parameter(module):
        if all(
            each.parameter_name in EXPERT_WEIGHTS and each.get_param().dim() == 3
            for each in parameter_wrappers(module)
        ):
            return
        received = f"target_parameters: {shown}, of {module.parameter_name}"
        remedy = (
            f"name {' and '.join(EXPERT_WEIGHTS)} of experts in target_parameters, and other layers in "
            f"target_modules=[…]; {UNLOAD}"
        )
    elif kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ not in (
        "Linear",
        "Embedding",
    ):
        received, remedy = shown, f"use {PLAIN}; {UNLOAD}"
    elif kind.__name__ == "Embedding":
        received = f"LoRA of an embedding: {shown}"
        remedy = f"leave it out of target_modules, or name it in modules_to_save; {UNLOAD}"
    elif type(module.base_layer) is not nn.Linear:
        base = type(module.base_layer)
        received = (
            f"a base of type {base.__module__}.{base.__name__} (QLoRA or another wrapper): {name}"
        )
        remedy = "load the model without quantisation, from_pretrained(…, dtype=torch.bfloat16)"
    elif module.fan_in_fan_out:
        received, remedy = f"fan_in_fan_out=True: {name}", "set it to False: nn.Linear is [out, in]"
    else:
        for variant in module.lora_variant.values():
            refuse_variant(name, variant)
        return
    raise UnsupportedError(
        expected="LoRA over torch.nn.Linear",
        received=f"a PEFT adapter that is not computed: {received}",
        remedy=remedy,
    )


def check_adapter(name: str, down: Any, up: Any, dropout: nn.Module) -> None:
    """Raise unless A, B and the dropout are what PEFT makes: they are read, and never called."""
    kinds = [plain_type(module) for module in (down, up, dropout)]
    is_plain = kinds[:2] == [nn.Linear, nn.Linear] and kinds[2] in (nn.Identity, nn.Dropout)
    if not is_plain or down.bias is not None:
        shown = ", ".join(kind.__qualname__ for kind in kinds)
        raise UnsupportedError(
            expected="A and B as torch.nn.Linear, A without bias, and torch.nn.Dropout or Identity",
            received=f"{shown}{'' if down.bias is None else ', A with a bias'} at {name}",
            remedy=f"use {PLAIN}",
        )


def refuse_variant(name: str, variant: Any) -> None:
    """Raise for DoRA, aLoRA and other variants, which compute another formula."""
    raise UnsupportedError(
        expected="LoRA over torch.nn.Linear",
        received=f"a PEFT adapter that is not computed: the variant {type(variant).__name__} at {name}",
        remedy=f"use {PLAIN}, without use_dora and the like; {UNLOAD}",
    )
