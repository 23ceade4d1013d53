"""Checks of a model's modules: raise for whatever isobit would not compute, with the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.adapter_kinds import check_wrapper, is_peft
from isobit.ops.arguments import refuse_distributed

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
AGAIN = "call isobit.disable(model), change the model, then isobit.enable(model) again"
# What there is for a model that `enable` does not compute.
ELSEWHERE = (
    "isobit.audit(model, inputs), or `isobit audit`, shows for any model what depends on the batch; "
    "docs/how-to/own-model.md builds other architectures from isobit's operators"
)
MERGE = (
    "use LoRA over linear layers, or merge it first: isobit.enable(peft_model.merge_and_unload())"
)


def refuse(expected: str, received: str, remedy: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(expected=expected, received=received, remedy=remedy)


def is_adapter(module: nn.Module) -> bool:
    """Return whether the module is PEFT's or has LoRA parameters."""
    return hasattr(module, "lora_A") or is_peft(module)


# ---- the tree, module by module -----------------------------------------------------------------------------


def check_tree(
    parts: Mapping[nn.Module, Any],
    names: Mapping[nn.Module, str],
    inside: Collection[nn.Module],
    installed: bool,
) -> None:
    """Raise for the first module that isobit would not compute as it is.

    Args:
        parts: Each module with its part.
        names: Each module with its name.
        inside: Modules that are never called, because another part computes them.
        installed: Whether `enable` installed the forwards of the parts.
    """
    sharded = any(isinstance(module, FSDPModule) for module in parts)
    for module, part in parts.items():
        name = names[module]
        check_parameters(name, module, sharded)
        if module in inside:
            check_unhooked(name, module)
        check_forward(name, module, part, installed)


def check_wrapped(name: str, module: nn.Module) -> None:
    """Raise if a module is an adapter's, or has a parametrization."""
    where = f"{name or 'the model'} of type {type(module).__module__}.{type(module).__name__}"
    if is_adapter(module) and "_active_adapter" in vars(module):
        check_wrapper(name, module)
    elif is_adapter(module):
        refuse("LoRA over torch.nn.Linear", f"a PEFT adapter that is not computed: {where}", MERGE)
    if hasattr(module, "parametrizations"):
        remedy = "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
        refuse(
            "weights that are parameters",
            f"a parametrization: {where}",
            f"{remedy}, then enable the model again",
        )


def check_parameters(name: str, module: nn.Module, sharded: bool) -> None:
    """Raise unless parameters are plain: a tensor subclass has its own operators, an attribute may be stale."""
    for key in ("weight", "bias"):
        if key in vars(module):
            refuse(
                f"{name}.{key} as a parameter",
                "an attribute that is none",
                f"assign torch.nn.Parameter to {key}",
            )
    for key, value in module._parameters.items():
        kind = type(value)
        if (
            value is None
            or kind in (nn.Parameter, Tensor)
            or (sharded and kind.__name__ == "DTensor")
        ):
            continue
        refuse_distributed(f"{name}.{key}", value)
        refuse(
            f"{name}.{key} as a plain torch.nn.Parameter",
            f"{kind.__module__}.{kind.__name__}",
            "load the model without quantisation or other tensor subclasses",
        )
    if isinstance(module, nn.Embedding):
        check_embedding(name, module)


def check_embedding(name: str, module: nn.Embedding) -> None:
    """Raise if an embedding scales or renormalises rows; checked at each call, because attributes can change."""
    if module.max_norm is not None or module.scale_grad_by_freq:
        refuse("a plain embedding", f"{name} with max_norm or scale_grad_by_freq", "unset them")


def check_unhooked(name: str, module: nn.Module) -> None:
    """Raise if a module that is never called has hooks, which would never run."""
    for key in HOOKS:
        if hooks := getattr(module, key):
            shown = getattr(next(iter(hooks.values())), "__qualname__", "a callable")
            refuse(
                f"no hook on {name}: the module that holds it computes it, and it is not called",
                f"{key.strip('_')} with {shown}",
                "put the hook on the module that holds it, or disable isobit",
            )


def check_forward(name: str, module: nn.Module, part: Any, installed: bool) -> None:
    """Raise unless the forward is isobit's, or was the class's before `enable`."""
    found: Any = vars(module).get("forward")
    ours = is_ours(found, module)
    if name and vars(module).get("_compiled_call_impl") is not None:
        refuse(
            f"{name} to run eagerly",
            "a module that was compiled by itself",
            "compile the whole model instead",
        )
    if not installed:
        if found is not None and not ours:
            refuse(
                f"the forward of its class for {name or 'the model'}",
                f"a forward of {getattr(found, '__module__', type(found).__name__)} on the instance",
                "call isobit.enable(model) before a trainer, accelerate or others replace forwards",
            )
        return
    as_it_was = found is None if part.forward is None else ours and found.isobit_forward == part
    if name and not as_it_was:
        refuse(
            "the modules that isobit.enable prepared",
            f"{name} of type {type(module).__name__}, which was put there later, or has another forward",
            AGAIN,
        )


def is_ours(forward: Any, module: nn.Module) -> bool:
    """Return whether `enable` installed this forward on this module; wrappers copy its name, not its arguments."""
    arguments = getattr(forward, "args", None) or (None,)
    return getattr(forward, "isobit_forward", None) is not None and arguments[-1] is module


def refuse_head_hooks() -> NoReturn:
    """Raise for what the loss and log-probabilities would skip: they read the head's weight only."""
    refuse(
        "no hook on lm_head where a loss or log-probabilities are computed, since no logits are",
        "a hook, which would not run",
        "remove the hook, or call the model without labels, which computes logits",
    )


def refuse_model_hooks() -> NoReturn:
    """Raise for hooks of the model itself, which `isobit.logprobs` does not call."""
    refuse(
        "no hook on the model itself where isobit.logprobs computes, since it calls the backbone",
        "a hook, which would not run (fully_shard puts one there too)",
        "remove the hook, put it on model.model, or take isobit.log_softmax of the logits of model(…)",
    )


def refuse_global_hooks() -> NoReturn:
    """Raise for global hooks of torch.nn.modules.module that would not run."""
    refuse(
        "no global module hooks in strict mode: modules that are not called would be missed",
        "a hook of torch.nn.modules.module.register_module_forward_hook or its like",
        "remove it, or pass strict=False to isobit.enable",
    )


def refuse_flushing(received: str) -> NoReturn:
    """Raise if subnormal numbers are flushed to zero: some threads would do so and others not."""
    refuse(
        "subnormal numbers to be kept in strict mode",
        received,
        "call torch.set_flush_denormal(False) before torch's first parallel operation, or pass strict=False",
    )


# ---- what is not the model ----------------------------------------------------------------------------------


def refuse_wrapper(model: Any) -> None:
    """Raise if this is not a model, or is a wrapper around one."""
    expected = "a transformers model"
    if isinstance(model, str):
        load = f'transformers.AutoModelForCausalLM.from_pretrained("{model}")'
        refuse(expected, f"a name, {model!r}", f"load it first: model = {load}")
    if not isinstance(model, nn.Module):
        refuse(expected, type(model).__name__, "pass the model object")
    shown = f"{type(model).__module__}.{type(model).__name__}"
    if is_adapter(model):
        refuse("a model without adapters", f"a PEFT model, {shown}", MERGE)
    if hasattr(model, "_orig_mod"):
        refuse(
            expected,
            f"a compiled model, {shown}",
            "enable the model first, then call torch.compile(model); isobit.logprobs takes the model that is not "
            "compiled",
        )
    if isinstance(getattr(model, "module", None), nn.Module):
        refuse(
            expected,
            f"a wrapper, {shown}",
            "pass the model itself, wrapper.module; train it over ranks inside isobit.parallel.Gradients, as DDP "
            "exchanges no gradient of a call that is not its own",
        )
    stock = library().PreTrainedModel
    held = [name for name, child in model.named_children() if isinstance(child, stock)]
    if held and not isinstance(model, stock):  # a LightningModule, or a module of one's own
        refuse(
            expected,
            f"{shown}, which has one as its attribute {held[0]}",
            f"pass the model itself: isobit.enable(module.{held[0]})",
        )
