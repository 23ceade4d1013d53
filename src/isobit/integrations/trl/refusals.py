"""What all trainers of TRL share: where they come from, and what isobit does not compute, each refused by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from isobit.errors import UnsupportedError


def stock_trainer(name: str, module: str = "trl") -> Any:
    """Return a trainer of TRL, which is imported here and not before."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            expected=f"TRL, with {module}.{name}",
            received=f"{error}",
            remedy="pip install trl datasets; tested with 1.16",
        ) from error


def refuse_liger(args: Any) -> None:
    """Raise for Liger's losses, whose sums have an order of their own."""
    if getattr(args, "use_liger_kernel", False):
        raise UnsupportedError(
            expected="use_liger_kernel=False",
            received="Liger's loss, whose sums have an order of their own",
            remedy="leave use_liger_kernel out: isobit's loss keeps no logits either",
        )


def refuse_policies(args: Any) -> None:
    """Raise for options under which the policy that samples is not the one that is scored."""
    refuse_liger(args)
    asked: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "min_p": (getattr(args, "min_p", None), (None, 0.0)),
        "repetition_penalty": (getattr(args, "repetition_penalty", 1.0), (None, 1.0)),
        "use_transformers_continuous_batching": (
            getattr(args, "use_transformers_continuous_batching", False),
            (False,),
        ),
        "generation_kwargs": (getattr(args, "generation_kwargs", None), (None, {})),
    }
    for name, (value, allowed) in asked.items():
        if value not in allowed:
            raise UnsupportedError(
                expected=f"{name}={allowed[0]}: a policy of temperature, top_k and top_p",
                received=f"{name}={value}",
                remedy="leave it out; its effect on log-probabilities is not scored",
            )


def refuse_stock_vllm(args: Any) -> None:
    """Raise where TRL would start vLLM: its engine has stock operators, and its weights come over NCCL."""
    if getattr(args, "use_vllm", False):
        raise UnsupportedError(
            expected="use_vllm=False: TRL's own way to vLLM has stock operators, whose log-probabilities differ",
            received="use_vllm=True",
            remedy="pass GRPOTrainer(rollouts=isobit.integrations.vllm.Rollouts(model, python))",
        )


def refuse_later_adapters(config: Any) -> None:
    """Raise where TRL would wrap the model after it was enabled."""
    if config is not None:
        raise UnsupportedError(
            expected="a model that has its adapters when it is enabled",
            received=f"peft_config={type(config).__name__}, which TRL applies to the enabled model",
            remedy="model = peft.get_peft_model(model, peft_config); isobit.enable(model); pass it without peft_config",
        )


def refuse_engines(accelerator: Any) -> None:
    """Raise where vLLM would compute another model than the one that is scored."""
    ranks, mixed = accelerator.num_processes, accelerator.mixed_precision
    if ranks != 1:
        raise UnsupportedError(
            expected="one process, where rollouts come from vLLM",
            received=f"{ranks} ranks",
            remedy="leave rollouts= out, so that each rank generates",
        )
    if mixed not in (None, "no"):
        raise UnsupportedError(
            expected="weights in the dtype that computes: vLLM has no autocast",
            received=f"mixed precision {mixed!r}",
            remedy="load the model in bf16 and set bf16=False, fp16=False",
        )


def refuse_images(compute_aux_loss: bool, images: dict[str, Any]) -> None:
    """Raise for what an enabled model does not compute."""
    given = [name for name, value in images.items() if value is not None]
    if compute_aux_loss or given:
        raise UnsupportedError(
            expected="text alone, and a dense model",
            received=f"{given}, auxiliary loss {compute_aux_loss}",
            remedy="use TRL's own trainer for images and mixtures of experts",
        )
