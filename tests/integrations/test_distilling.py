"""Theorem: a distilled model is one model, over ranks, micro-batches and kinds of teachers.

A small Qwen3 learns from a larger one: one loss curve and one digest over 1 and 2 ranks × 1 and 4 micro-batches, from
the live teacher and from its stored logits.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isobit import UnsupportedError, bits
from isobit.gates.training.workload import (
    Workload,
    active_tokens,
    draw_samples,
    lay_out,
    make_model,
)
from isobit.integrations.transformers.distilling import distil, most_likely, teacher_states
from isobit.integrations.transformers.enabling import enable
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
    assert float(loss.detach()) == 0.0
    grads: list[Tensor] = [p.grad for p in student.parameters() if p.grad is not None]
    assert grads
    assert all(bool((g == 0).all()) for g in grads)


def test_a_teacher_in_training_mode_is_refused():
    student, teacher = models()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="eval"):
        distil(student, teacher.train(), ids)
