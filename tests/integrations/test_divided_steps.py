"""How a GRPO step is divided over ranks and micro-batches, and what is refused there; needs no TRL."""

from types import SimpleNamespace

import pytest

import isobit
from isobit.errors import CutError
from isobit.integrations.trl.divided_steps import division_of
from isobit.parallel import GlobalBatch


def divided(size, accumulation, ranks, mixed="no", **options):
    args = SimpleNamespace(
        per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, **options
    )
    return division_of(args, SimpleNamespace(num_processes=ranks, mixed_precision=mixed))


def test_a_step_is_divided_where_it_can_be():
    assert divided(4, 2, 2) == GlobalBatch(total=16, ranks=2, micro_batches=2)
    assert divided(8, 1, 2) == GlobalBatch(total=16, ranks=2)
    assert divided(4, 2, 1) == GlobalBatch(total=8, micro_batches=2)


def test_one_rank_may_leave_the_sum_to_autograd():
    assert divided(8, 1, 1) is None
    assert divided(4, 3, 1) is None
    assert divided(4, 2, 1, "bf16") is None


@pytest.mark.parametrize("option", ["deepspeed", "fsdp", "mixed precision"])
def test_several_ranks_refuse_who_else_sums_gradients(option):
    options = {"mixed": "bf16"} if option == "mixed precision" else {option: "zero2"}
    with pytest.raises(isobit.UnsupportedError, match=option):
        divided(4, 1, 2, **options)


def test_several_ranks_refuse_a_step_that_has_no_such_cut():
    with pytest.raises(CutError):
        divided(4, 3, 2)
