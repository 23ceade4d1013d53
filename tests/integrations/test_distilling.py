"""Theorem: a distilled model is one model, over ranks, micro-batches and kinds of teachers.

A small Qwen3 learns from a larger one: one loss curve and one digest over 1 and 2 ranks × 1 and 4 micro-batches, from
the live teacher and from its stored logits.
"""

import itertools
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.gates.training.workload import (
    Workload,
    active_tokens,
    draw_samples,
    lay_out,
    make_model,
)
from isobit.integrations.transformers.distilling import distil, most_likely, teacher_states
from isobit.integrations.transformers.enabling import enable
from isobit.integrations.transformers.scoring import perplexity
from isobit.integrations.transformers.teacher_store import (
    TeacherStore,
    verify_store,
    write_store,
)
from isobit.integrations.trl.gkd import OrderedGKD
from isobit.ops.distillation.reference import divergence
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.linear.op import linear_fp32
from isobit.optim import AdamW
from isobit.parallel import GlobalBatch, Gradients
from isobit.parallel.data.loss_meter import LossMeter
from isobit.simulator import World

SMALL = Workload("small", 32, 48, 2, 2, 1, 64, 8, 2, head_dim=16)
LARGE = Workload("large", 48, 64, 2, 2, 2, 64, 8, 2, head_dim=16, seed=1)
HOW = {"temperature": 2.0, "alpha": 0.7}


def models():
    student, teacher = (make_model(w, torch.float32) for w in (SMALL, LARGE))
    for model in (student, teacher.eval()):
        enable(model, strict=False)
    return student, teacher


def train(ranks: int, micro: int, direction: str, kind: str = "live") -> tuple[list[float], str]:
    """Losses of each step, and a digest of the student's weights."""
    student, teacher = models()
    gradients = Gradients(student, GlobalBatch(SMALL.samples, ranks, micro))
    optimizer = AdamW(student.parameters(), lr=1e-3)
    group = dist.group.WORLD if ranks > 1 else None
    losses = []
    for step in range(SMALL.steps):
        optimizer.zero_grad()
        samples, meter = draw_samples(SMALL, step), LossMeter()
        active = active_tokens(samples)
        for index in range(micro):
            held = gradients.batch.samples(gradients.rank, index)
            rows = lay_out(samples[held.start : held.stop])
            source = teacher
            if kind == "stored":
                source = linear_fp32(*teacher_states(teacher, rows.ids, rows.mask, None))
            with gradients.micro_batch(index):
                options = {"direction": direction, "reduction": "none", **HOW}
                each = distil(student, source, rows.ids, rows.mask, **options)
                (exact_sum(each) / active).backward()
            meter.add(each.detach(), rows.active)
        losses.append(float(meter.value(group, dtype=torch.float32)))
        optimizer.step()
    weights = torch.cat([p.detach().reshape(-1) for p in student.parameters()])
    return losses, bits.digest(weights)


@pytest.mark.parametrize("direction", ["forward", pytest.param("jsd", marks=pytest.mark.full)])
def test_one_model_over_ranks_and_micro_batches(direction):
    whole = train(1, 1, direction)
    found = [train(1, 4, direction), train(1, 2, direction, "stored")]
    for micro in (1, 4):
        found += World(2).run(lambda rank, m=micro: train(2, m, direction)).values
    assert whole[0][0] > 0
    assert found == [whole] * 6


def test_the_teachers_words_do_not_depend_on_the_batch():
    _, teacher = models()
    rows = lay_out(draw_samples(SMALL, 0))
    ids, values = most_likely(teacher, rows.ids, rows.mask, count=8, temperature=2.0)
    for at in range(len(rows.ids)):
        length = int(rows.mask[at].sum())
        alone = most_likely(teacher, rows.ids[at : at + 1, :length], count=8, temperature=2.0)
        assert torch.equal(alone[0][0], ids[at, :length])
        assert bits.equal(alone[1][0], values[at, :length])


def test_a_model_learns_nothing_from_itself():
    student, _ = models()
    rows = lay_out(draw_samples(SMALL, 0))
    known = teacher_states(student.eval(), rows.ids, rows.mask, None)
    loss = distil(student, known, rows.ids, rows.mask, alpha=1.0, temperature=2.0)
    loss.backward()
    assert loss.item() == 0.0
    grads: list[Tensor] = [p.grad for p in student.parameters() if p.grad is not None]
    assert grads
    assert all(bool((g == 0).all()) for g in grads)


def test_a_teacher_in_training_mode_is_refused():
    student, teacher = models()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="eval"):
        distil(student, teacher.train(), ids)


def store_of(tmp_path, teacher, samples, count=6, name="store"):
    path = tmp_path / f"{name}.safetensors"
    write_store(path, teacher, samples, count=count, temperature=2.0)
    return path


def spoil(path, kind: str, seed: int):
    """Write the store again with one fault."""
    tensors = load_file(path)
    about = TeacherStore(path).about
    names = sorted(json.loads(about["tokens"]))
    one, other = (f"s{(seed + i) % len(names)}" for i in (0, 1))
    if kind == "order":
        for part in ("ids", "logprobs"):
            keys = f"{one}.{part}", f"{other}.{part}"
            tensors[keys[0]], tensors[keys[1]] = tensors[keys[1]], tensors[keys[0]]
    elif kind == "dtype":
        tensors[f"{one}.logprobs"] = tensors[f"{one}.logprobs"].bfloat16()
    save_file(tensors, path, metadata=about)


def test_wrong_teacher_stores_are_named(tmp_path):
    """FALSIFY-ALBOR-006: 30 of 30 wrong stores are named; the right one has the bits of live inference."""
    student, teacher = models()
    drawn = draw_samples(SMALL, 0)[:5]
    length = min(len(sample) for sample in drawn)
    samples = {f"s{i}": sample[:length] for i, sample in enumerate(drawn)}
    path = store_of(tmp_path, teacher, samples)
    assert verify_store(path, teacher, samples) == []
    found = []
    right = path.read_bytes()
    for kind, seed in itertools.product(("order", "dtype", "weights"), range(10)):
        path.write_bytes(right)
        if kind != "weights":
            spoil(path, kind, seed)
            causes = {one.cause for one in verify_store(path, teacher, samples)}
        else:
            with torch.no_grad():
                weight = next(itertools.islice(teacher.parameters(), seed, None))
                kept = weight.clone()
                weight.view(-1)[0] += 2.0**-10
                causes = {one.cause for one in verify_store(path, teacher, samples)}
                weight.copy_(kept)
        found.append(causes == {kind})
    assert found == [True] * 30
    path.write_bytes(right)
    ids = torch.stack(list(samples.values()))
    mask = torch.ones_like(ids)
    live = most_likely(teacher, ids, mask, count=6, temperature=2.0)
    stored = TeacherStore(path).batch(list(samples), ids, mask)
    losses = [distil(student, t, ids, mask, temperature=2.0).detach() for t in (live, stored)]
    assert bits.equal(*losses)
    with pytest.raises(ArgumentError, match="tokenize once"):
        TeacherStore(path).batch(list(samples)[::-1], ids, mask)


# Metadata of a store that is changed; a tensor of sample s0 that is written instead.
FORGED = {
    "no tokens": {"tokens": None},
    "no teacher": {"teacher": None},
    "no count": {"count": None},
    "deep tokens": {"tokens": "[" * 100_000},
    "a list of tokens": {"tokens": "[]"},
    "a count that is no number": {"count": "six"},
    "no words": {"count": "0"},
    "more words than there are": {"count": str(10**12)},
    "no temperature": {"temperature": "nan"},
    "a missing tensor": {"s0.ids": None},
    "an entry for every token": {"s0.ids": lambda t: t[:1], "s0.logprobs": lambda t: t[:1]},
    "a token less": {"s0.ids": lambda t: t[1:], "s0.logprobs": lambda t: t[1:]},
    "a word for every word": {"s0.ids": lambda t: t[:, :1], "s0.logprobs": lambda t: t[:, :1]},
    "ids that are no integers": {"s0.ids": lambda t: t + 0.5},
    "rounded": {"s0.logprobs": lambda t: t.bfloat16()},
    "no probabilities": {"s0.logprobs": lambda t: t.abs()},
    "nan": {"s0.logprobs": lambda t: t * float("nan")},
    "words of another vocabulary": {"s0.ids": lambda t: t + 1000},
    "a word twice": {"s0.ids": lambda t: t * 0},
}


def words_of(path, ids):
    return TeacherStore(path).batch(["s0"], ids, torch.ones_like(ids))


@pytest.mark.parametrize("how", FORGED)
def test_forged_teacher_stores_raise(how, tmp_path):
    """A store that does not fit is not trained on: an entry of one token would be broadcast to all others."""
    student, teacher = models()
    ids = draw_samples(SMALL, 0)[0][None]
    path = store_of(tmp_path, teacher, {"s0": ids[0]})
    assert len(words_of(path, ids)) == 2
    tensors, about = load_file(path), dict(TeacherStore(path).about)
    for key, value in FORGED[how].items():
        held = tensors if key in tensors else about
        held[key] = value(tensors[key]).contiguous() if callable(value) else value
        if value is None:
            del held[key]
    save_file(tensors, path, metadata=about)
    with pytest.raises(ArgumentError):
        distil(student, words_of(path, ids), ids, temperature=2.0)


def test_what_does_not_fit_to_a_teachers_words_raises(tmp_path):
    student, teacher = models()
    ids = draw_samples(SMALL, 0)[0][None]
    store = TeacherStore(store_of(tmp_path, teacher, {"s0": ids[0]}))
    for words in (
        store.batch(["s0"], ids, torch.ones_like(ids)),
        most_likely(teacher, ids, count=3),
    ):
        other = 3 - words.temperature
        distil(student, words, ids, temperature=words.temperature)
        assert pickle.loads(pickle.dumps(words)).temperature == words.temperature
        with pytest.raises(ArgumentError, match="ask the teacher again at"):
            distil(student, words, ids, temperature=other)
    with pytest.raises(ArgumentError, match="a sample id for each row"):
        store.batch(["s0"], ids.repeat(2, 1), torch.ones(2, ids.shape[1]))
    for count in (0, 1000):
        with pytest.raises(ArgumentError, match="the words of the teacher"):
            most_likely(teacher, ids, count=count)
    with pytest.raises(ArgumentError, match="a positive temperature"):
        most_likely(teacher, ids, count=3, temperature=0.0)


def test_perplexity_is_one_number():
    """FALSIFY-ALBOR-009: the same for every batch size, order and number of ranks."""
    _, teacher = models()
    samples = draw_samples(SMALL, 0)

    def batches(size, mine=samples):
        rows = [lay_out(mine[at : at + size]) for at in range(0, len(mine), size)]
        return [(one.ids, one.mask) for one in rows]

    whole = perplexity(teacher, batches(8))
    assert whole > 1
    assert {perplexity(teacher, batches(size)) for size in (1, 3)} == {whole}
    assert perplexity(teacher, batches(3, samples[::-1])) == whole
    found = World(2).run(
        lambda rank: perplexity(models()[1], batches(2, samples[rank * 4 : rank * 4 + 4]))
    )
    assert found.values == [whole] * 2


class StandInTrainer:
    """What OrderedGKD uses of TRL's trainer."""

    def __init__(self, student, teacher, beta):
        self.model, self.teacher_model, self.beta = student, teacher, beta
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


def trl_loss(student, teacher, beta):
    """TRL's generalized_jsd_loss, in fp64 and summed over words."""
    q, p = (x.double().log_softmax(-1) for x in (student, teacher))
    if beta in (0, 1):
        return divergence(p, q, "forward" if beta == 0 else "reverse", 0.5)
    return divergence(p, q, "jsd", beta)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_gkd_trainers_loss(beta):
    class Trainer(OrderedGKD, StandInTrainer):
        pass

    student, teacher = models()
    trainer = Trainer(student.eval(), teacher, beta)
    rows = lay_out(draw_samples(SMALL, 0))
    labels = rows.ids.masked_fill(rows.mask == 0, -100)
    labels[:, :2] = -100
    inputs = {"input_ids": rows.ids, "attention_mask": rows.mask, "labels": labels}
    found = trainer.compute_loss(student, inputs)
    with torch.no_grad():
        logits = [m(rows.ids, attention_mask=rows.mask).logits for m in (student, teacher)]
    kept = labels[:, 1:] != -100
    wanted = trl_loss(*logits, beta)[:, :-1][kept].mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    halves = [
        trainer.compute_loss(
            student, {k: v[at] for k, v in inputs.items()}, num_items_in_batch=kept.sum()
        )
        for at in (slice(0, 3), slice(3, 8))
    ]
    assert (halves[0] + halves[1]).item() == pytest.approx(found.item(), rel=1e-6)
    with pytest.raises(UnsupportedError, match="prediction_loss_only"):
        trainer.compute_loss(student, inputs, return_outputs=True)


def tokenizer_that_chats():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(SMALL.vocabulary - 3)}
    words |= {name: len(words) + i for i, name in enumerate(("<pad>", "<eos>", "<unk>"))}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] + ' <eos> ' }}{% endfor %}"
    return made


@pytest.mark.full
@pytest.mark.usefixtures("no_vllm")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own_rollouts", [0.0, 0.25, 1.0])  # in no, one and all steps
def test_trl_s_gkd_trainer_makes_one_model_for_every_division(tmp_path, capsys, own_rollouts):
    """Three steps of eight samples, in 1, 2 and 4 micro-batches; with TRL's data the loss is TRL's."""
    pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.gkd import GKDTrainer as StockTrainer

    from isobit.integrations.trl import GKDTrainer

    generator = torch.Generator().manual_seed(3)
    chats = []
    for at in range(8):
        said = [
            " ".join(f"t{int(i)}" for i in torch.randint(0, 60, (n,), generator=generator))
            for n in (2 + at % 3, 3 + at % 4)
        ]
        roles = zip(("user", "assistant"), said, strict=True)
        chats.append([{"role": role, "content": text} for role, text in roles])

    def train(kind, prepared, micro_batches=1):
        student, teacher = (make_model(w, torch.float32) for w in (SMALL, LARGE))
        if prepared:
            for model in (student, teacher):
                enable(model, strict=False)
        args = GKDConfig(
            str(tmp_path),
            per_device_train_batch_size=8 // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_steps=3,
            learning_rate=1e-3,
            lmbda=own_rollouts,
            beta=0.0,
            max_new_tokens=4,
            optim="adamw_torch",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
        )
        trainer = kind(
            model=student,
            teacher_model=teacher,
            args=args,
            train_dataset=Dataset.from_dict({"messages": chats}),
            processing_class=tokenizer_that_chats(),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, bits.digest(student)

    found = [train(GKDTrainer, True, micro_batches) for micro_batches in (1, 2, 4)]
    stock = [train(StockTrainer, False, micro_batches) for micro_batches in (1, 4)]
    with capsys.disabled():
        for name, each in (("isobit", found), ("stock", stock)):
            print(f"\nlmbda {own_rollouts}, {name}:", *(f"{one[1][:16]} {one[0]}" for one in each))
    losses = found[0][0]
    assert len(losses) == 3
    assert all(loss > 0 for loss in losses)
    assert found[0][1] != bits.digest(make_model(SMALL, torch.float32))
    assert found == [found[0]] * 3
    assert len({digest for _, digest in stock}) == 2  # the control
    if own_rollouts == 0.0:
        assert all(other == pytest.approx(losses, rel=1e-3) for other, _ in stock)
        # Planted: isobit's loss alone, whose rounded gradients the Trainer adds.
        planted = type("LossAlone", (OrderedGKD, StockTrainer), {})
        assert len({train(planted, True, micro_batches)[1] for micro_batches in (1, 4)}) == 2
    with pytest.raises(UnsupportedError, match="enable"):
        train(GKDTrainer, False)
