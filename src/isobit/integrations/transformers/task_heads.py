"""Heads other than the language model's: reward models and critics, and the heads of encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.forwards import (
    kind_of,
    layout_of,
    refuse_other_loss,
    run_checked,
)
from isobit.integrations.transformers.layout import LAYOUT, Layout, in_force, of_global_batch
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.heads import BACKBONE
from isobit.integrations.transformers.state import require_state
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.loss import divisor, refuse_mean_of_share
from isobit.ops.logprob.op import IGNORED
from isobit.ops.select_rows.op import select_rows
from isobit.ops.share import accumulation_dtype, share_in_force

# Heads of reward models and critics: a score of each sample's last token, or of every token, and their losses.
#
# [Note: the token that a sample is scored by] transformers scores every token, then takes the rightmost one of each
# row whose id is not config.pad_token_id. Here these rows of the hidden states are selected first
# (isobit.select_rows), and the layer `score` sees one row per sample: the same logits, and a gradient without a sum
# over places. Where ids, mask and padding contradict one another, stock scores padding; here that is an error. A text
# that ends with the padding token is scored at the last token before, as transformers does. Samples that are packed
# into one row have a score each.

REGRESSION, SINGLE, MULTI = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_sequence_classification(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    return_dict: bool | None = None,
    **inputs: Any,
) -> Any:
    """Score one token of each sample, [samples, labels]; with labels, also return the loss."""
    layout = layout_of(
        input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, inputs
    )
    inputs[LAYOUT] = layout
    rows = scored_rows(module, input_ids, layout)
    problem = None if labels is None else problem_of(module, labels)

    def run() -> Any:
        found = getattr(module, BACKBONE)(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **inputs,
        )
        chosen = select_rows(found.last_hidden_state, rows).unsqueeze(1)  # [samples, 1, H]
        with in_force(one_row_each(layout, len(rows))):
            logits = module.score(chosen).squeeze(1)
        count = inputs.get("num_items_in_batch")
        return library("modeling_outputs").SequenceClassifierOutputWithPast(
            loss=None if labels is None else sequence_loss(problem, logits, labels, count),
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )

    kind = (*kind_of(module, layout, past_key_values, use_cache), "sequence", problem)
    output = run_checked(require_state(module), module, kind, run)
    wanted = module.config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_token_classification(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    return_dict: bool | None = None,
    **inputs: Any,
) -> Any:
    """Score every token, [B, T, labels]; with labels, also return the loss."""
    layout = layout_of(
        input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, inputs
    )
    inputs[LAYOUT] = layout
    if labels is not None:
        refuse_other_loss(module, "ForTokenClassification")
        check_labels_of_padding(labels, layout)

    def run() -> Any:
        found = getattr(module, BACKBONE)(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **inputs,
        )
        with in_force(layout):
            logits = module.score(module.dropout(found.last_hidden_state))
        count = inputs.get("num_items_in_batch")
        return library("modeling_outputs").TokenClassifierOutput(
            loss=None if labels is None else mean_of(*cross_entropies(logits, labels), count),
            logits=logits,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )

    kind = (*kind_of(module, layout, past_key_values, use_cache), "tokens", labels is not None)
    output = run_checked(require_state(module), module, kind, run)
    wanted = module.config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


# ---- which token ----------------------------------------------------------------------------------------------


def spans_of_layout(layout: Layout) -> list[tuple[int, int]]:
    """Return (first row, rows) of each sample, counted over [B, T]."""
    if layout.samples is not None:
        return list(layout.samples.spans)
    batch, width = layout.positions.shape
    return [(row * width, width) for row in range(batch)]


def scored_rows(module: Any, input_ids: Tensor | None, layout: Layout) -> Tensor:
    """Return the row of [B · T] that scores each sample; see the note above."""
    pad, spans = module.config.get_text_config().pad_token_id, spans_of_layout(layout)
    if pad is None or input_ids is None:
        rows = last_rows(layout, spans, pad)
    else:
        rows = last_texts(input_ids, layout, spans, pad)
    return torch.tensor(rows, dtype=torch.int64, device=layout.positions.device)


def last_texts(
    input_ids: Tensor, layout: Layout, spans: list[tuple[int, int]], pad: int
) -> list[int]:
    """Return the last row of each sample whose id is not `pad`."""
    ids, width, rows = input_ids.reshape(-1).tolist(), input_ids.shape[1], []
    for at, (start, length) in enumerate(spans):
        row = start + length - 1
        while row >= start and ids[row] == pad:
            row -= 1
        if row < start:
            raise ArgumentError(
                expected="a token to score in each sample: one that is not config.pad_token_id",
                received=f"sample {at} of {length} tokens, all of them {pad}"
                if length
                else f"sample {at} without tokens",
                remedy="leave out empty samples; if the text has this token, choose another pad_token_id",
            )
        end = (row // width + 1) * width
        if layout.kind != "packed" and any(ids[i] != pad for i in range(start + length, end)):
            raise ArgumentError(
                expected=f"config.pad_token_id, {pad}, at the places behind a sample that attention_mask leaves out",
                received=f"other ids behind sample {at}, which transformers would score",
                remedy="set model.config.pad_token_id to the token that the tokenizer pads with",
            )
        rows.append(row)
    return rows


def last_rows(layout: Layout, spans: list[tuple[int, int]], pad: int | None) -> list[int]:
    """Return the last row of each sample, where ids cannot show which rows are padding."""
    batch, width = layout.positions.shape
    if pad is None and batch != 1:
        raise ArgumentError(
            expected="config.pad_token_id, by which the last token of each sample is found",
            received=f"None, and a batch of {batch}",
            remedy="set model.config.pad_token_id = tokenizer.pad_token_id, or pass one row at a time",
        )
    rows = [start + length - 1 for start, length in spans]
    if layout.kind != "packed" and any(row % width != width - 1 for row in rows):
        what = "no config.pad_token_id" if pad is None else "inputs_embeds, which have no ids"
        raise ArgumentError(
            expected="samples that end with their row of the batch",
            received=f"padding behind a sample, and {what}: transformers would score the padding",
            remedy="set model.config.pad_token_id and pass input_ids, or pad on the left",
        )
    return rows


def one_row_each(layout: Layout, count: int) -> Layout:
    """Return the layout of one row per sample, [samples, 1, ...], in the same global batch."""
    samples = of_global_batch([(at, 1) for at in range(count)], count)
    positions = torch.zeros(count, 1, dtype=torch.int64, device=layout.positions.device)
    return Layout("plain", positions, samples, samples, 1)


# ---- losses ---------------------------------------------------------------------------------------------------


def problem_of(module: Any, labels: Tensor) -> str:
    """Return the kind of loss, as transformers chooses it from config and labels."""
    refuse_other_loss(module, "ForSequenceClassificationLoss")
    config = module.config
    known = config.problem_type
    if known is None:
        whole = labels.dtype in (torch.int64, torch.int32)
        known = REGRESSION if config.num_labels == 1 else SINGLE if whole else MULTI
    if known not in (REGRESSION, SINGLE, MULTI):
        raise ArgumentError(
            expected=f"config.problem_type of {REGRESSION}, {SINGLE} or {MULTI}, or None",
            received=repr(known),
            remedy="set model.config.problem_type",
        )
    return str(known)


def sequence_loss(
    problem: str | None, logits: Tensor, labels: Tensor, count: Tensor | float | None
) -> Tensor:
    """Return the mean of the terms that transformers takes, or their sum divided by `num_items_in_batch`."""
    if problem == SINGLE:
        return mean_of(*cross_entropies(logits, labels), count)
    check_shape(logits, labels)
    found = logits.to(accumulation_dtype(logits.dtype))
    wanted = labels.reshape(logits.shape).to(found)
    if problem == REGRESSION:
        terms = (found - wanted).square()
    else:  # −log σ(z) is −log_softmax of (z, 0), whose sums have an order
        both = log_softmax(torch.stack((found, torch.zeros_like(found)), dim=-1))
        yes, no = both.unbind(-1)
        terms = -(wanted * yes + (1.0 - wanted) * no)
    return mean_of(terms, terms.numel(), count)


def check_shape(logits: Tensor, labels: Tensor) -> None:
    """Raise unless there is a label per logit; stock would broadcast them."""
    if labels.numel() != logits.numel() or len(labels) != len(logits):
        raise ArgumentError(
            expected=f"labels of shape {list(logits.shape)}, one per logit",
            received=str(list(labels.shape)),
            remedy="pass one label per sample, or config.num_labels of them",
        )


def cross_entropies(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return −log p of the labels of rows [..., L] that have one, and their number."""
    classes, flat = logits.shape[-1], labels.reshape(-1).to(logits.device)
    if flat.numel() != logits.shape[:-1].numel() or flat.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            expected=f"labels of shape {list(logits.shape[:-1])}, int64 or int32",
            received=f"{labels.dtype} of shape {list(labels.shape)}",
            remedy=f"pass one class per row of logits; {IGNORED} for none",
        )
    wrong = ((flat < 0) & (flat != IGNORED)) | (flat >= classes)
    if bool(wrong.any()):
        raise ArgumentError(
            expected=f"labels from 0 to {classes - 1}, or {IGNORED} for none",
            received=str(int(flat[wrong][0])),
            remedy="set config.num_labels to the number of classes",
        )
    every = log_softmax(logits.to(accumulation_dtype(logits.dtype))).reshape(-1, 1)
    rows = (flat != IGNORED).nonzero().flatten()
    return -select_rows(every, rows * classes + flat[rows]), len(rows)


def mean_of(terms: Tensor, number: int, count: Tensor | float | None) -> Tensor:
    """Return the exact sum of the terms, divided by their number or by that of the global batch."""
    if count is None:
        refuse_mean_of_share()
    items = number if count is None else float(count)
    if not items > 0:
        raise ArgumentError(
            expected="a label in the batch",
            received=f"{items:g} labels",
            remedy=f"leave out batches whose labels are all {IGNORED}",
        )
    return exact_sum(terms) / divisor(items, terms)


def check_labels_of_padding(labels: Tensor, layout: Layout) -> None:
    """Raise if a row outside of every sample has a label: its share of the mean would depend on the padding."""
    if layout.samples is None or labels.shape != layout.positions.shape:
        return
    outside = torch.ones(labels.numel(), dtype=torch.bool, device=labels.device)
    for start, length in layout.samples.spans:
        outside[start : start + length] = False
    if bool((labels.reshape(-1)[outside] != IGNORED).any()):
        raise ArgumentError(
            expected=f"labels of {IGNORED} at places that attention_mask leaves out",
            received="other labels there",
            remedy=f"labels = labels.masked_fill(attention_mask == 0, {IGNORED})",
        )


# Heads of encoders, whose tokens see both sides: logits of each token, a score of each sample, or of each token.
#
# A sample is scored by its first token, which is at the start of the sample wherever that is in the batch. Stock takes
# the first column of the batch, which is padding where samples are padded on the left.

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
