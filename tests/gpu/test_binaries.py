"""Theorem: the number of binaries does not grow with the number of rows, and a kernel made for one number is found."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import isobit
from benchmarks.binaries import count, growing
from benchmarks.kernel_launches import (
    MIXTURE,
    SMALL,
    both_ways,
    empty,
    expert_operators,
    product_operators,
)
from isobit.ops.gpu.launching import run
from isobit.ops.logprob import triton as executor

BF16 = torch.bfloat16
ROWS, FURTHER = (1, 3, 17, 512), (16, 48, 1000)


@triton.jit(do_not_specialize=["M"])
def double(x, M):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < M), mask=at < M)


@triton.jit
def double_by_values(x, M):  # Triton makes other binaries of M = 1 and of multiples of 16
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < M), mask=at < M)


@triton.jit
def double_of_one_size(x, M: tl.constexpr):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < M), mask=at < M)


def calls_of(kernel):
    def calls(model, rows, dtype):
        x, grid = torch.empty(rows, dtype=dtype), (-(-rows // 16),)
        if kernel is double_of_one_size:
            yield "double", lambda: run(kernel, grid, x, warps=1, M=rows)
        else:
            yield "double", lambda: run(kernel, grid, x, rows, warps=1)

    return calls


def operators(model, rows, dtype):
    """One operator of each kind; `record kernels` has all of them."""
    x, weight = empty(rows, model.hidden, dtype=dtype), empty(64, model.hidden, dtype=dtype)
    yield "rms_norm", lambda: both_ways(isobit.rms_norm, x, empty(model.hidden, dtype=dtype))
    yield "softmax", lambda: both_ways(isobit.softmax, x)
    yield "swiglu", lambda: both_ways(isobit.swiglu, x, x)
    yield "linear", lambda: both_ways(isobit.linear, x, weight)
    q = empty(rows, 4, 64, dtype=dtype)
    yield "attention", lambda: both_ways(lambda q: isobit.attention(q, q, q, is_causal=True), q)


def totals(calls, rows=ROWS + FURTHER):
    return count("sm_90", [SMALL], BF16, rows, calls)


def test_binaries_do_not_grow_with_rows():
    found = totals(operators)
    assert set(found) == {"rms_norm", "softmax", "swiglu", "linear", "attention"}
    assert all(launches >= 14 and numbers[0] >= 2 for launches, numbers, _ in found.values())
    assert growing(found, len(ROWS)) == []
    assert all(numbers[-1] == written for _, numbers, written in found.values())


# Of each form and each number of words at a time, and then others.
TOKENS = (1, 3, 17, 100, 512, 1000, 5000, 20000)
MORE_TOKENS = (441, 442, 777, 2048, 3000, 8191, 8193, 32768)


def logprob(model, rows, dtype):
    """At the size of a real vocabulary, of which nothing is read."""
    hidden, weight = (empty(n, model.hidden, dtype=dtype) for n in (rows, 151_936))
    targets = torch.zeros(rows, dtype=torch.int64)
    yield (
        "logprob",
        lambda: both_ways(lambda *given: isobit.linear_logprob(*given, targets), hidden, weight),
    )


@pytest.fixture
def _nothing_is_filled(monkeypatch):
    """Memory of a real vocabulary costs nothing while nobody touches it."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.mark.usefixtures("_nothing_is_filled")
def test_binaries_do_not_grow_with_tokens_at_a_real_vocabulary():
    found = totals(logprob, TOKENS + MORE_TOKENS)
    assert growing(found, len(TOKENS)) == []
    assert len(found["logprob"][1]) == len(TOKENS + MORE_TOKENS)


@pytest.mark.usefixtures("_nothing_is_filled")
def test_binaries_do_not_grow_with_tokens_of_a_mixture_of_real_size():
    """Experts of 128 have other numbers of rows at each number of tokens, some none."""
    first, further = (1, 3, 17, 40), (2, 16, 70)
    found = count("sm_90", [MIXTURE], BF16, first + further, expert_operators)
    assert set(found) == {"route", "experts"}
    assert found["experts"][0] > 1000
    assert growing(found, len(first)) == [], found


def attention(model, rows, dtype):
    return (one for one in product_operators(model, rows, dtype) if one[0] == "attention")


def test_binaries_of_attention_with_eight_queries_for_each_head_of_keys():
    """Two rows are the first with 9 to 16 rows of a head; after every form was reached nothing is added."""
    first, further = (1, 2, 3, 17), (4, 5, 16, 33, 129)
    found = count("sm_90", [MIXTURE], BF16, first + further, attention)
    assert growing(found, len(first)) == [], found
    assert growing(found, 1) != []


@pytest.mark.usefixtures("_nothing_is_filled")
def test_words_that_follow_the_tokens_are_found(monkeypatch):
    monkeypatch.setattr(executor, "words_at_a_time", executor.tokens_at_a_time)
    found = totals(logprob, (1000, 5000, 777, 3000))
    assert growing(found, 2) != []


def test_a_kernel_that_takes_rows_at_run_time_has_one_binary():
    assert totals(calls_of(double)) == {"double": (7, [1] * 7, 1)}


def test_a_kernel_made_for_one_number_of_rows_is_found():
    found = totals(calls_of(double_of_one_size))
    assert found == {"double": (7, [1, 2, 3, 4, 5, 6, 7], 7)}
    assert growing(found, len(ROWS)) == ["double: 4 binaries at 4 numbers of rows, 7 at 7"]


def test_a_kernel_that_triton_specialises_by_rows_is_counted():
    """M = 1, M = 3 and 17, and multiples of 16 are three binaries of one written kernel."""
    found = totals(calls_of(double_by_values))
    assert found == {"double": (7, [1, 2, 2, 3, 3, 3, 3], 1)}
    assert growing(totals(calls_of(double_by_values), (1, 3, 16)), 2) != []
