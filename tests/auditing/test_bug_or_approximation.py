"""Theorem: a report says "bug" only of what neither rounding nor an approximation explains, in a result that is read.

1. Stock attention of random models in bf16 is never called an error: not for the logsumexp that a forward drops.
2. A wrong mask, a sum in bf16 and a scale that is wrong by 2^-6 are called bugs.
3. An exponential of 12 bits is "a bug or an approximation"; the same error in a sum, which has nothing to approximate,
   is a bug.
4. A result that nothing reads comes last and is never in the first sentence; the same result, read, is.
"""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import isobit
from isobit.auditing.judging.accuracy import explain
from isobit.auditing.records import ERROR
from isobit.auditing.replay.call import Call
from isobit.auditing.report.json import audit_as_json, audit_from_json
from isobit.auditing.report.sentence import conclude

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def llama(seed: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()


@pytest.mark.parametrize("seed", range(1, 6))
def test_stock_attention_in_bf16_is_no_bug(seed):
    report = isobit.audit(
        llama(seed), {"input_ids": torch.randint(0, 64, (4, 16))}, vary=("padding",)
    )
    assert [str(one.place) for one in report.guilty if one.kind == ERROR] == []
    assert "bug" not in str(report)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_stock_attention_is_no_bug_on_any_axis(seed):
    dtype = torch.float16 if seed % 5 == 4 else torch.bfloat16
    report = isobit.audit(llama(seed).to(dtype), {"input_ids": torch.randint(0, 64, (4, 16))})
    assert [str(one.place) for one in report.guilty if one.is_error] == []
    assert "bug" not in str(report)


def queries(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, 16, 8, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_mask_is_a_bug(seed, dtype):
    call = Call(ATTENTION, (*queries(seed, dtype), 0.0, True), {})
    wrong = Call(ATTENTION, (*queries(seed, dtype), 0.0, False), {})
    for which in (0, 1):
        kind, accuracy = explain(call, wrong.run()[which], call.run()[which], which)
        assert kind == ERROR
        assert not accuracy.approximation


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_scale_is_a_bug(seed):
    q, k, v = queries(seed, torch.float32)
    call = Call(ATTENTION, (q, k, v), {})
    wrong = Call(ATTENTION, (q, k, v), {"scale": 8**-0.5 * (1 + 2.0**-6)})
    kind, accuracy = explain(call, wrong.run()[0], call.run()[0])
    assert (kind, accuracy.approximation) == (ERROR, False)


@torch.library.custom_op("tested::sum_of_rows", mutates_args=())
def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


@pytest.mark.parametrize(
    "operator", [torch.ops.tested.sum_of_rows.default, torch.ops.aten.sum.dim_IntList]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_sum_in_bf16_is_a_bug(operator, seed):
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(seed))
    args = (x,) if operator is torch.ops.tested.sum_of_rows.default else (x, [-1])
    in_bf16 = torch.zeros(4, dtype=torch.bfloat16)
    for term in x.t():
        in_bf16 = in_bf16 + term.bfloat16()
    kind, accuracy = explain(Call(operator, args, {}), in_bf16.float(), x.sum(-1))
    assert (kind, accuracy.approximation) == (ERROR, False)


def test_an_exponential_of_few_bits_is_a_bug_or_an_approximation():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    near = x.exp() * (1 + 2.0**-12)
    for operator in (torch.ops.aten.exp.default, torch.ops.aten._softmax.default):
        rows = operator is torch.ops.aten._softmax.default
        call = Call(operator, (x, -1, False) if rows else (x,), {})
        coarse = near / x.exp().sum(-1, keepdim=True) if rows else near
        kind, accuracy = explain(call, coarse, call.run())
        assert (kind, accuracy.approximation) == (ERROR, True)
    for operator in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor):
        call = Call(operator, (x, x), {})
        kind, accuracy = explain(call, call.run() * (1 + 2.0**-12), call.run())
        assert (kind, accuracy.approximation) == (ERROR, False)


def test_another_formula_of_gelu_may_be_an_approximation():
    x = torch.linspace(-4, 4, 512)
    call = Call(torch.ops.aten.gelu.default, (x,), {})
    kind, accuracy = explain(call, torch.nn.functional.gelu(x, approximate="tanh"), call.run())
    assert (kind, accuracy.approximation) == (ERROR, True)


@torch.library.custom_op("tested::with_statistics", mutates_args=())
def with_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return twice the rows, and a mean of each that is wrong where there are several samples."""
    return x * 2, x.mean(-1) * (1.5 if len(x) > 1 else 1.0)


class Statistics(nn.Module):
    """Use the second result of an operator, or not."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads = isobit.nn.Linear(8, 8), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, mean = torch.ops.tested.with_statistics(self.layer(x))
        return rows + mean[:, None] if self.reads else rows


@pytest.mark.parametrize("reads", [True, False])
def test_a_result_that_nothing_reads_is_never_the_headline(reads, tmp_path):
    torch.manual_seed(0)
    report = isobit.audit(Statistics(reads), torch.randn(4, 8), vary=("batch",))
    (one,) = report.guilty
    assert (one.kind, one.unread, one.is_error) == (ERROR, not reads, reads)
    assert conclude(report).startswith("This is a bug") == reads
    assert ("only in a result that nothing in the run reads" in str(report)) != reads
    assert audit_from_json(audit_as_json(report)).guilty[0].unread != reads
    report.save(tmp_path / "audit.html")
    assert ("nothing in the run reads" in (tmp_path / "audit.html").read_text()) != reads


def test_unread_results_come_last():
    torch.manual_seed(0)
    model = nn.Sequential(Statistics(reads=False), Statistics(reads=True))
    report = isobit.audit(model, torch.randn(4, 8), vary=("batch",))
    assert [(one.place.module, one.unread) for one in report.guilty] == [("1", False), ("0", True)]


def test_results_that_are_read_by_numpy_are_not_called_unread():
    class ByNumpy(Statistics):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, mean = torch.ops.tested.with_statistics(self.layer(x))
            return rows + torch.from_numpy(mean.numpy() * 2)[:, None]

    torch.manual_seed(0)
    report = isobit.audit(ByNumpy(True), torch.randn(4, 8), vary=("batch",))
    (one,) = report.guilty
    assert not one.unread
    assert report.exit_code == 1
