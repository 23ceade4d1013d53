"""Reward models and critics: a score and its gradients depend on the sample, not on its batch.

Alone = padded left = padded right = packed, bit for bit, and gradients are equal in these layouts and in 1, 2 and 4
micro-batches; stock's differ in the same layouts.
"""

import copy

import pytest
import torch
import transformers

import isobit
from isobit import ArgumentError, UnsupportedError, bits
from isobit.parallel import GlobalBatch, Gradients

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "attention_bias": True,
    "sliding_window": 16,
}
LENGTHS = (23, 7, 40, 11)
PAD = 0


def build(head, dtype=torch.float32, family="Qwen3", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    config.classifier_dropout = 0.0
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config, dtype=dtype).eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model


def texts():
    """Samples of ids; the second contains the padding token, and the third ends with it."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, 96, (n,), generator=generator) for n in LENGTHS]
    found[1][2] = PAD
    found[2][-1] = PAD
    return found


def batch_of(samples, side, values=None):
    """Return ids and mask, padded to 43; with `values` also these, filled up with -100."""
    ids = torch.full((len(samples), 43), PAD)
    mask, extra = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        at = slice(43 - len(sample), 43) if side == "left" else slice(0, len(sample))
        ids[row, at], mask[row, at] = sample, 1
        if values is not None:
            extra[row, at] = values[row]
    given = {"input_ids": ids, "attention_mask": mask}
    return given if values is None else given | {"labels": extra}


def packed(samples, values=None):
    given = {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat([torch.arange(len(s)) for s in samples])[None],
    }
    return given if values is None else given | {"labels": torch.cat(values)[None]}


def labels_of(head, options):
    """Labels of the samples: numbers, classes, several yes or no, or a class per token."""
    generator = torch.Generator().manual_seed(2)
    if head == "TokenClassification":
        return [torch.randint(0, 3, (n,), generator=generator) for n in LENGTHS]
    if options["num_labels"] == 1:
        return torch.randn(4, generator=generator)
    if options.get("problem_type") == "multi_label_classification":
        return torch.randint(0, 2, (4, 3), generator=generator).float()
    return torch.randint(0, 3, (4,), generator=generator)


def layouts(head, labels):
    """Yield the name and the arguments of each layout, with labels."""
    samples, tokens = texts(), head == "TokenClassification"
    for side in ("left", "right"):
        given = batch_of(samples, side, labels if tokens else None)
        yield side, given if tokens else given | {"labels": labels}
    given = packed(samples, labels if tokens else None)
    yield "packed", given if tokens else given | {"labels": labels}


def gradients_of(model, given):
    model.zero_grad(set_to_none=True)
    loss = model(**given, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def differing(found, expected):
    return sum(not bits.equal(a, b) for a, b in zip(found, expected, strict=True))


HEADS = {
    "regression": ("SequenceClassification", {"num_labels": 1}),
    "single label": ("SequenceClassification", {"num_labels": 3}),
    "multi label": (
        "SequenceClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
    ),
    "tokens": ("TokenClassification", {"num_labels": 3}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", HEADS)
def test_a_loss_and_its_gradients_are_equal_in_every_layout(what, dtype):
    head, options = HEADS[what]
    model, labels = build(head, dtype, **options), labels_of(head, options)
    stock = [gradients_of(model, given) for _, given in list(layouts(head, labels))[:2]]
    isobit.enable(model)
    left, right, together = (gradients_of(model, given) for _, given in layouts(head, labels))
    assert (differing(right, left), differing(together, left)) == (0, 0)
    assert differing(stock[1], stock[0]) > len(left) // 2  # the control
    if dtype == torch.float32:  # stock counts positions from the padding on the left
        for ours, theirs in zip(right, stock[1], strict=True):
            room = 1e-5 * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=0, atol=max(room, 1e-7))


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral", "Olmo2", "Phi3", "Gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reward_is_equal_alone_padded_and_packed(dtype, family):
    model, samples = build("SequenceClassification", dtype, family, num_labels=1), texts()
    right = batch_of(samples, "right")
    with torch.no_grad():
        stock = model(**right).logits
        stock_alone = torch.cat([model(sample[None]).logits for sample in samples])
        isobit.enable(model)
        alone = torch.cat([model(sample[None]).logits for sample in samples])
        for given in (right, batch_of(samples, "left"), packed(samples)):
            assert bits.equal(model(**given).logits, alone)
    assert alone.dtype == dtype
    room = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(alone, stock_alone, rtol=0, atol=room)
    assert dtype == torch.bfloat16 or not bits.equal(stock, stock_alone)  # the control


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_tokens_are_equal_alone_padded_and_packed(dtype):
    """verl's critic: AutoModelForTokenClassification with one label."""
    model, samples = build("TokenClassification", dtype, num_labels=1), texts()
    stock = model(**batch_of(samples, "right")).logits
    isobit.enable(model)
    with torch.no_grad():
        alone = [model(sample[None]).logits[0] for sample in samples]
        right = model(**batch_of(samples, "right")).logits
        left = model(**batch_of(samples, "left")).logits
        together = model(**packed(samples)).logits[0].split(LENGTHS)
    for at, n in enumerate(LENGTHS):
        for found in (right[at, :n], left[at, -n:], together[at]):
            assert bits.equal(found, alone[at])
        room = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(alone[at], stock[at, :n], rtol=0, atol=room)


@pytest.mark.parametrize("what", ["regression", "single label", "tokens"])
def test_micro_batches_have_the_gradients_of_the_whole_batch(what):
    head, options = HEADS[what]
    model = build(head, torch.bfloat16, **options)
    labels, samples = labels_of(head, options), texts()
    tokens = head == "TokenClassification"
    isobit.enable(model)
    items = sum(LENGTHS) if tokens else len(samples)
    found = []
    for count in (1, 2, 4):
        trained = copy.deepcopy(model)
        gradients = Gradients(trained, GlobalBatch(total=4, ranks=1, micro_batches=count))
        for at in range(count):
            chosen = slice(at * 4 // count, (at + 1) * 4 // count)
            side = "left" if at % 2 else "right"
            given = batch_of(samples[chosen], side, labels[chosen] if tokens else None)
            if not tokens:
                given["labels"] = labels[chosen]
            with gradients.micro_batch(at):
                trained(**given, use_cache=False, num_items_in_batch=items).loss.backward()
        found.append([p.grad.clone() for p in trained.parameters()])
        gradients.close()
    assert (differing(found[1], found[0]), differing(found[2], found[0])) == (0, 0)
    whole = batch_of(samples, "left", labels if tokens else None)
    if not tokens:
        whole["labels"] = labels
    assert differing(found[0], gradients_of(model, whole)[1:]) == 0


def test_a_share_without_the_number_of_items_is_an_error():
    model = isobit.enable(build("SequenceClassification", num_labels=1))
    given = batch_of(texts()[:2], "right") | {"labels": torch.zeros(2)}
    gradients = Gradients(model, GlobalBatch(total=4, ranks=1, micro_batches=2))
    with pytest.raises(UnsupportedError, match="number of targets"), gradients.micro_batch(0):
        model(**given)
    gradients.close()


# ---- which token is scored ------------------------------------------------------------------------------------


def test_the_scored_token_is_stock_s():
    """A padding token inside the text, and at its end: the last one that differs from it."""
    model, samples = build("SequenceClassification", num_labels=2), texts()
    given = batch_of(samples, "right")
    stock = model(**given).logits
    isobit.enable(model)
    torch.testing.assert_close(model(**given).logits, stock, rtol=0, atol=1e-5)
    unmasked = given | {"attention_mask": torch.ones_like(given["input_ids"])}
    isobit.disable(model)
    stock = model(**unmasked).logits  # without a mask, padding is text
    isobit.enable(model)
    torch.testing.assert_close(model(**unmasked).logits, stock, rtol=0, atol=1e-5)


def test_padding_that_is_not_the_padding_token_is_an_error():
    """Stock scores it: a row that no mask covers."""
    model = isobit.enable(build("SequenceClassification", num_labels=1))
    given = batch_of(texts(), "right")
    given["input_ids"][1, -3:] = 5
    with pytest.raises(ArgumentError, match="behind sample 1, which transformers would score"):
        model(**given)
    given["input_ids"][1] = PAD
    with pytest.raises(ArgumentError, match="sample 1 of 7 tokens, all of them 0"):
        model(**given)
    left = batch_of(texts(), "left")
    left["input_ids"][1, :3] = 5  # in front of a sample it changes nothing
    model(**left)


def test_without_a_padding_token_only_one_row_can_be_scored():
    model = build("SequenceClassification", num_labels=1)
    model.config.pad_token_id = None
    samples = texts()
    stock = model(samples[0][None]).logits
    isobit.enable(model)
    torch.testing.assert_close(model(samples[0][None]).logits, stock, rtol=0, atol=1e-5)
    assert model(**packed(samples)).logits.shape == (4, 1)
    with pytest.raises(ArgumentError, match="None, and a batch of 4"):
        model(**batch_of(samples, "left"))
    with pytest.raises(
        ArgumentError, match=r"padding behind a sample, and no config\.pad_token_id"
    ):
        model(**batch_of(samples[:1], "right"))


def test_embeddings_are_scored_at_the_end_of_their_row():
    model, samples = build("SequenceClassification", num_labels=1), texts()
    isobit.enable(model)
    left = batch_of(samples[:2], "left")
    embeds = model.get_input_embeddings().weight[left.pop("input_ids")].detach()
    expected = torch.cat([model(sample[None]).logits for sample in samples[:2]])
    assert bits.equal(model(inputs_embeds=embeds, **left).logits, expected)
    right = batch_of(samples[:2], "right")
    embeds = model.get_input_embeddings().weight[right.pop("input_ids")].detach()
    with pytest.raises(ArgumentError, match="inputs_embeds, which have no ids"):
        model(inputs_embeds=embeds, **right)


# ---- labels, dropout, hooks -----------------------------------------------------------------------------------


def test_labels_that_do_not_fit_are_errors():
    model = isobit.enable(build("SequenceClassification", num_labels=3))
    given = batch_of(texts(), "right")
    for labels, what in (
        (torch.tensor([0, 1, 3, 0]), "labels from 0 to 2"),
        (torch.tensor([0, 1]), r"labels of shape \[4\]"),
        (torch.full((4,), -100), "0 labels"),
        (torch.zeros(4, 2), r"labels of shape \[4, 3\]"),
    ):
        with pytest.raises(ArgumentError, match=what):
            model(**given, labels=labels)
    model.config.problem_type = "ranking"
    with pytest.raises(ArgumentError, match="ranking"):
        model(**given, labels=torch.tensor([0, 1, 2, 0]))
    model.config.problem_type = None
    model.loss_function = torch.nn.functional.mse_loss
    with pytest.raises(UnsupportedError, match="ForSequenceClassificationLoss"):
        model(**given, labels=torch.tensor([0, 1, 2, 0]))


def test_labels_of_padding_are_errors():
    model = isobit.enable(build("TokenClassification", num_labels=3))
    given = batch_of(texts(), "right", labels_of("TokenClassification", {}))
    given["labels"][given["labels"] == -100] = 0
    with pytest.raises(ArgumentError, match="attention_mask leaves out"):
        model(**given)


def test_dropout_of_the_head_is_keyed():
    """As transformers' critics have it by default; without a key it is an error."""
    model = isobit.enable(build("TokenClassification", num_labels=3))
    labels = labels_of("TokenClassification", {})
    given = {side: batch_of(texts(), side, labels) for side in ("left", "right")}
    plain = model(**given["left"]).loss
    model.dropout.p = 0.3
    assert bits.equal(model(**given["left"]).loss, plain)
    model.train()
    with pytest.raises(UnsupportedError, match=r"(?s)dropout of 0\.3 in training.*dropout_key"):
        model(**given["left"])
    found = []
    for side, step in (("left", 0), ("right", 0), ("right", 1)):
        model.zero_grad()
        with isobit.sampling.dropout_key(seed=1, step=step):
            loss = model(**given[side]).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((bits.digest(loss.detach()), bits.digest(grads)))
    assert found[0] == found[1]
    assert found[1][1] != found[2][1]
    assert not bits.equal(loss, plain)


def test_hooks_on_the_head_run_and_disable_gives_stock_back():
    model, given = build("SequenceClassification", num_labels=1), batch_of(texts(), "right")
    stock, seen = model(**given).logits, []
    isobit.enable(model)
    model.score.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    whole = model(**given, return_dict=False)
    assert seen == [torch.Size([4, 1, 1])]
    assert isinstance(whole, tuple)
    assert bits.equal(isobit.disable(model)(**given).logits, stock)


def test_an_enabled_reward_model_can_be_copied_and_has_no_logprobs():
    model = isobit.enable(build("SequenceClassification", num_labels=1))
    given = batch_of(texts(), "right")
    assert bits.equal(copy.deepcopy(model)(**given).logits, model(**given).logits)
    with pytest.raises(ArgumentError, match="language-model head"):
        isobit.logprobs(model, given["input_ids"], given["attention_mask"])
