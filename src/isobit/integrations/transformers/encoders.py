"""Heads of encoders, whose tokens see both sides: logits of each token, a score of each sample, or of each token.

A sample is scored by its first token, which is at the start of the sample wherever that is in the batch. Stock takes
the first column of the batch, which is padding where samples are padded on the left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.classification import (
    check_labels_of_padding,
    cross_entropies,
    mean_of,
    one_row_each,
    problem_of,
    sequence_loss,
    spans_of_layout,
)
from isobit.integrations.transformers.forwards import (
    kind_of,
    layout_of,
    refuse_other_loss,
    run_checked,
)
from isobit.integrations.transformers.layout import LAYOUT, Layout, in_force
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.heads import BACKBONE
from isobit.integrations.transformers.state import require_state
from isobit.ops.select_rows.op import select_rows
from isobit.ops.share import share_in_force

Finish = Callable[[Tensor], tuple[Tensor | None, Tensor]]  # hidden states to loss and logits


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_masked_lm(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    return_dict: bool | None = None,
    **inputs: Any,
) -> Any:
    """Return the logits of each token, [B, T, V]; with labels, also the mean of −log p of the masked tokens."""
    layout = layout_of(input_ids, inputs_embeds, attention_mask, position_ids, None, inputs)
    if labels is not None:
        refuse_other_loss(module, "ForMaskedLMLoss")
        refuse_sparse(module)
        check_labels_of_padding(labels, layout)
    refuse_tied_decoder(module)

    def finish(hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        with in_force(layout):
            logits = module.decoder(module.head(hidden))
        count = inputs.get("num_items_in_batch")
        loss = None if labels is None else mean_of(*cross_entropies(logits, labels), count)
        return loss, logits

    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **inputs}
    kind = ("masked", labels is not None)
    return run_encoder(module, layout, given, kind, finish, "MaskedLMOutput", return_dict)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_first_token(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    return_dict: bool | None = None,
    **inputs: Any,
) -> Any:
    """Score the first token of each sample, [samples, labels]; with labels, also return the loss."""
    if module.config.classifier_pooling != "cls":
        raise UnsupportedError(
            expected='a score of the first token of each sample: classifier_pooling="cls"',
            received=f"classifier_pooling={module.config.classifier_pooling!r}",
            remedy='set config.classifier_pooling to "cls", if the model was trained so; or enable the backbone alone: '
            f"isobit.enable(model.{BACKBONE})",
        )
    layout = layout_of(input_ids, inputs_embeds, attention_mask, position_ids, None, inputs)
    problem = None if labels is None else problem_of(module, labels)
    first = [start for start, _ in spans_of_layout(layout)]
    rows = torch.tensor(first, dtype=torch.int64, device=layout.positions.device)

    def finish(hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        chosen = select_rows(hidden, rows).unsqueeze(1)  # [samples, 1, H]
        with in_force(one_row_each(layout, len(rows))):
            logits = module.classifier(module.drop(module.head(chosen))).squeeze(1)
        count = inputs.get("num_items_in_batch")
        loss = None if labels is None else sequence_loss(problem, logits, labels, count)
        return loss, logits

    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **inputs}
    kind = ("first token", problem)
    return run_encoder(module, layout, given, kind, finish, "SequenceClassifierOutput", return_dict)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_every_token(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    return_dict: bool | None = None,
    **inputs: Any,
) -> Any:
    """Score every token, [B, T, labels]; with labels, also return the loss."""
    layout = layout_of(input_ids, inputs_embeds, attention_mask, position_ids, None, inputs)
    if labels is not None:
        check_labels_of_padding(labels, layout)

    def finish(hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        with in_force(layout):
            logits = module.classifier(module.drop(module.head(hidden)))
        count = inputs.get("num_items_in_batch")
        loss = None if labels is None else mean_of(*cross_entropies(logits, labels), count)
        return loss, logits

    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **inputs}
    kind = ("every token", labels is not None)
    return run_encoder(module, layout, given, kind, finish, "TokenClassifierOutput", return_dict)


def run_encoder(
    module: Any,
    layout: Layout,
    inputs: dict[str, Any],
    kind: tuple[Any, ...],
    finish: Finish,
    output: str,
    return_dict: bool | None,
) -> Any:
    """Run the backbone and what follows it, as one kind of call."""

    def run() -> Any:
        found = getattr(module, BACKBONE)(**inputs, return_dict=True, **{LAYOUT: layout})
        loss, logits = finish(found.last_hidden_state)
        return getattr(library("modeling_outputs"), output)(
            loss=loss,
            logits=logits,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )

    kind = (*kind_of(module, layout, None, False), *kind)
    made = run_checked(require_state(module), module, kind, run)
    wanted = module.config.return_dict if return_dict is None else return_dict
    return made if wanted else made.to_tuple()


def refuse_sparse(module: Any) -> None:
    """Raise where only logits of masked tokens are computed: their shape would depend on the labels."""
    if getattr(module, "sparse_prediction", False):
        raise UnsupportedError(
            expected="logits of every token, where labels are passed",
            received="sparse_prediction=True, which computes those of masked tokens only",
            remedy="set model.sparse_prediction = False: the loss is the same",
        )


def refuse_tied_decoder(module: Any) -> None:
    """Raise if a tied weight is trained on a share: autograd would add its two uses within each share."""
    weight = module.decoder.weight
    tied = share_in_force() is not None and weight is module.get_input_embeddings().weight
    if tied and weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            expected="a leaf for each use of a tied weight, where a share of the global batch is trained on",
            received="one weight of embedding and decoder",
            remedy="train through isobit.parallel.Gradients, which makes them; or on the whole batch at once",
        )
