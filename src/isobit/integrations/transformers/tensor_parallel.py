"""Split an enabled transformers model over ranks (tensor parallelism), with the bits of the whole one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import CutError
from isobit.integrations.transformers.modules import share_count
from isobit.integrations.transformers.state import require_state
from isobit.order.cut import Cut
from isobit.order.plan import FEATURE_CAP, count_segments
from isobit.parallel.tensor.shard import Ranks, Ties, join_module, split_module

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


def shard(model: nn.Module, mesh: DeviceMesh | Ranks) -> Ranks:
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
    """
    require_state(model)
    ranks = Ranks.of(mesh)
    check_cuts(model, ranks)
    ties: Ties = {}
    for module, axes in split_modules(model):
        known = {name: axis for name, axis in axes.items() if getattr(module, name) is not None}
        split_module(
            module,
            known,
            ranks,
            ties if isinstance(module, nn.Embedding) or is_head(model, module) else None,
        )
    return ranks


def unshard(model: nn.Module) -> None:
    """Gather the whole parameters on every rank; all ranks call this together."""
    ties: Ties = {}
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


def check_cuts(model: Any, ranks: Ranks) -> None:
    """Raise unless every sum over a cut axis falls on segment edges."""
    for module in model.modules():
        if hasattr(module, "q_proj"):
            rows = [len(layer.weight) for layer in (module.q_proj, module.k_proj, module.v_proj)]
            heads = [count // module.head_dim for count in rows]
            Cut(sum(rows), ranks.parts, ranks.coordinate)
            Cut(module.o_proj.weight.shape[1], ranks.parts, ranks.coordinate)
            check_shares("key heads", heads[1], ranks)
            for count in heads[:2] if hasattr(module, "q_norm") else ():
                check_shares(
                    f"segments of the {count} heads of a norm",
                    count_segments(count, 1, FEATURE_CAP),
                    ranks,
                )
        elif hasattr(module, "gate_proj"):
            features = len(module.gate_proj.weight)
            check_shares("shares of gate and up", share_count(features), ranks)
            Cut(2 * features, ranks.parts, ranks.coordinate)
            Cut(features, ranks.parts, ranks.coordinate)
        elif hasattr(module, "embed_tokens"):
            Cut(module.embed_tokens.num_embeddings, ranks.parts, ranks.coordinate)


def check_shares(what: str, count: int, ranks: Ranks) -> None:
    """Raise unless the number divides evenly over ranks."""
    if count % ranks.parts:
        raise CutError(
            expected=f"a number of ranks that divides {count}, the number of {what}",
            received=f"{ranks.parts} ranks",
            remedy="use fewer ranks along this mesh axis",
        )
