"""Split an enabled transformers model over ranks (tensor parallelism), with the bits of the whole one."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import CutError, UnsupportedError
from isobit.integrations.transformers.layout import CONTEXT
from isobit.integrations.transformers.parts.experts import forward_clamped_experts, forward_experts
from isobit.integrations.transformers.parts.linear import share_count
from isobit.integrations.transformers.parts.recognition import Plan
from isobit.integrations.transformers.refusals import refuse
from isobit.integrations.transformers.state import require_state
from isobit.order.cut import Cut
from isobit.order.plan import FEATURE_CAP, count_segments
from isobit.parallel.same_environment import require_same_arithmetic
from isobit.parallel.tensor.expert_exchange import check_count, split_experts
from isobit.parallel.tensor.shard import Ties, join_module, split_module
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup

# By the last part of a module's name: the axis of each of its parameters that is cut. A norm of heads is whole on each
# rank, which has some of the heads; every other module is whole, and each rank computes all of it.
COLUMN, ROW, VOCABULARY, HEADS = (
    {"weight": 0, "bias": 0},
    {"weight": 1},
    {"weight": 0},
    dict[str, int](),
)
AXES: dict[str, dict[str, int]] = {
    "q_proj": COLUMN,
    "k_proj": COLUMN,
    "v_proj": COLUMN,
    "o_proj": ROW,
    "q_norm": HEADS,
    "k_norm": HEADS,
    "gate_proj": COLUMN,
    "up_proj": COLUMN,
    "down_proj": ROW,
    "embed_tokens": VOCABULARY,
    "lm_head": VOCABULARY,
}


EXCHANGED = (forward_experts, forward_clamped_experts)  # forwards that send rows to other ranks


def shard(model: nn.Module, mesh: DeviceMesh | TensorParallelGroup) -> TensorParallelGroup:
    """Keep this rank's part of each parameter, in place; outputs and gradients have the unsplit bits.

    Queries, keys and values are cut by KV-head groups, gate and up by outputs, o_proj and down_proj by inputs,
    embedding and head by the vocabulary. All cuts are checked before the first is made.

    Args:
        model: An enabled model; every rank calls this with the same weights.
        mesh: The mesh axis to split over, such as `mesh["tp"]`.

    Returns:
        The ranks that share the model.

    Raises:
        CutError: If a dimension cannot be cut into this number of ranks along the plan.
            UnsupportedError: If a linear layer or a norm of queries or keys is not one whose cut is known, or the model
            has PEFT adapters.
    """
    plan = require_state(model).plan
    if plan.wrappers:
        refuse(
            "a model without adapters, to split over ranks",
            "one with PEFT adapters, whose A and B are not split",
            "split isobit.enable(isobit.integrations.transformers.merged_copy(model)); train adapters data-parallel",
        )
    check_known(plan)
    tp_group = TensorParallelGroup.of(mesh)
    check_cuts(model, tp_group)
    ties: Ties = {}
    for module, axes in split_modules(model):
        known = {name: axis for name, axis in axes.items() if getattr(module, name) is not None}
        split_module(
            module,
            known,
            tp_group,
            ties if isinstance(module, nn.Embedding) or is_head(model, module) else None,
        )
    return tp_group


def shard_experts(model: nn.Module, mesh: DeviceMesh | TensorParallelGroup) -> TensorParallelGroup:
    """Keep this rank's experts of every layer, in place; each rank goes on to have tokens of its own.

    Rows are sent to the ranks of their experts and back. Train through `isobit.parallel.Gradients` with the group of
    these ranks, or `Levels` whose innermost group it is.

    Args:
        model: An enabled model with experts; every rank calls this with the same weights.
        mesh: The mesh axis to split experts over, such as `mesh["ep"]`: data-parallel ranks.

    Returns:
        The ranks that share the experts.

    Raises:
        CutError: The number of ranks does not divide the experts.
        UnsupportedError: The model has no experts, or PEFT adapters.
    """
    plan, ranks = require_state(model).plan, TensorParallelGroup.of(mesh)
    found: list[Any] = [module for module, part in plan.parts.items() if part.name == "experts"]
    if not found or plan.wrappers:
        refuse(
            "an enabled model with experts and without adapters, to split over ranks",
            "one with PEFT adapters"
            if plan.wrappers
            else f"{type(model).__name__}, without experts",
            "train it with data parallelism or FSDP2 (isobit.parallel.Gradients)",
        )
    for module in found:
        if plan.parts[module].forward not in EXCHANGED:
            refuse(
                "experts whose rows are exchanged between ranks",
                f"{plan.names[module]} of type {type(module).__name__}",
                "train it with data parallelism or FSDP2 (isobit.parallel.Gradients)",
            )
        check_count(module.num_experts, ranks)
    for module in found:
        split_experts(module, [name for name, _ in module.named_parameters(recurse=False)], ranks)
    return ranks


def split_context(
    model: nn.Module, mesh: DeviceMesh | TensorParallelGroup | None
) -> TensorParallelGroup:
    """Split the attention of every layer over ranks which all have the same tokens; None undoes it.

    Each rank computes its part of the queries in forward, and of the key heads in backward; linear layers, norms and
    experts run on each rank. See [Note: attention over ranks] in parallel/tensor/context_attention.py.

    Args:
        model: An enabled model; every rank calls it with the same inputs.
        mesh: The mesh axis to split attention over, such as `mesh["cp"]`.

    Returns:
        The ranks that share the attention.
    """
    state, ranks = require_state(model), TensorParallelGroup.of(mesh)
    for dtype in {p.dtype for p in model.parameters()}:
        require_same_arithmetic(dtype, ranks.group)
    for module, part in state.plan.parts.items():
        if part.name == "attention":
            module.__dict__[CONTEXT] = ranks
    return ranks


def check_known(plan: Plan) -> None:
    """Raise unless the cut of every linear layer and embedding, and of what follows a cut layer, is known by name."""
    for module, part in plan.parts.items():
        name = plan.names[module]
        last = name.rpartition(".")[2]
        if part.name == "experts":
            refuse_cut(f"{name} of type {type(module).__name__}, a mixture of experts")
        if part.name in ("linear", "embedding", "logits") and last not in AXES:
            refuse_cut(f"{name} of type {type(module).__name__}, which no rule cuts over ranks")
        if part.name == "linear" and (AXES[last] is COLUMN) != (part.settings[0] is not None):
            refuse_cut(
                f"{name}, which {'shares' if part.settings[0] else 'does not share'} its input with others"
            )
        parent = plan.model.get_submodule(name.rpartition(".")[0])
        if plan.parts[parent].name != "attention" or part.name != "norm":
            continue
        formula = part.settings[0]
        weight: Any = getattr(module, "weight", None)
        whole = weight is None or len(weight) != parent.head_dim
        if last not in AXES or whole or formula.offset or formula.kind != "rms":
            refuse_cut(
                f"{name} of type {type(module).__name__}, a norm that is not of each head by its own weight"
            )


def refuse_cut(received: str) -> NoReturn:
    """Raise for a module whose cut over ranks is not known."""
    raise UnsupportedError(
        expected=f"linear layers and embeddings that are cut by their names: {', '.join(AXES)}",
        received=received,
        remedy="train with data parallelism or FSDP2 (isobit.parallel.Gradients), which takes every enabled model",
    )


def unshard(model: nn.Module) -> None:
    """Gather the whole parameters on every rank; all ranks call this together."""
    ties: Ties = {}
    for module, part in require_state(model).plan.parts.items():
        if part.name == "experts":
            join_module(module)
    for module, _ in split_modules(model):
        join_module(
            module, ties if isinstance(module, nn.Embedding) or is_head(model, module) else None
        )


def split_modules(model: nn.Module) -> list[tuple[nn.Module, dict[str, int]]]:
    """Return the modules to split, and the axis to cut of each."""
    named = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    return [(module, AXES[name]) for name, module in named if name in AXES]


def is_head(model: Any, module: nn.Module) -> bool:
    """Return whether this is the language-model head, whose weight may be the embedding's."""
    return getattr(model, "lm_head", None) is module


def check_cuts(model: Any, tp_group: TensorParallelGroup) -> None:
    """Raise unless every sum over a cut axis falls on segment edges."""
    for module in model.modules():
        if hasattr(module, "q_proj"):
            rows = [len(layer.weight) for layer in (module.q_proj, module.k_proj, module.v_proj)]
            heads = [count // module.head_dim for count in rows]
            Cut(sum(rows), tp_group.size, tp_group.rank)
            Cut(module.o_proj.weight.shape[1], tp_group.size, tp_group.rank)
            check_shares("key heads", heads[1], tp_group)
            for count in heads[:2] if hasattr(module, "q_norm") else ():
                check_shares(
                    f"segments of the {count} heads of a norm",
                    count_segments(count, 1, FEATURE_CAP),
                    tp_group,
                )
        elif hasattr(module, "gate_proj"):
            features = len(module.gate_proj.weight)
            check_shares("shares of gate and up", share_count(features), tp_group)
            Cut(2 * features, tp_group.size, tp_group.rank)
            Cut(features, tp_group.size, tp_group.rank)
        elif hasattr(module, "embed_tokens"):
            Cut(module.embed_tokens.num_embeddings, tp_group.size, tp_group.rank)


def check_shares(what: str, count: int, tp_group: TensorParallelGroup) -> None:
    """Raise unless the number divides evenly over ranks."""
    if count % tp_group.size:
        raise CutError(
            expected=f"a number of ranks that divides {count}, the number of {what}",
            received=f"{tp_group.size} ranks",
            remedy="use fewer ranks along this mesh axis",
        )
