"""Kernels whose rows depend on the batch: by tensors that only their values tell apart.

Each passes another tensor from 16 rows on that torch made in a way that looks the same, or that something changed
unseen. One list of what torch can do would always miss some of them.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl

from tests.certifying.wrong_calls import scaled_by
from tests.certifying.wrong_inputs import N, scaled_rows

FEW = 16
ROWS = torch.randn(70_000, N)
LENGTHS = torch.randint(1, 9, (70_000,), dtype=torch.int32)
PLACES = torch.randperm(16)
SQUARE = torch.randn(16, 16)
TABLE = torch.randn(2 * N)


@triton.jit
def by_flag(x, flags, out, n, BLOCK: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + r * n + c)
    if tl.load(flags + r) > 0:
        value = value * 3.0
    tl.store(out + r * n + c, value)


@triton.jit
def shares(x, out, n, BLOCK: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + r * n + c)
    tl.store(out + r * n + c, value / tl.sum(value, 0))


@triton.jit
def changed_by(x, out, n, CHANGE: tl.constexpr, BLOCK: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + r * n + c, CHANGE(tl.load(x + r * n + c)))


def times_function(factor):
    FACTOR = tl.constexpr(factor)

    @triton.jit
    def times(value):
        return value * FACTOR

    return times


def times_kernel(factor):
    FACTOR = tl.constexpr(factor)

    @triton.jit
    def kernel(x, weight, out, n, BLOCK: tl.constexpr):
        r, c = tl.program_id(0), tl.arange(0, BLOCK)
        tl.store(out + r * n + c, tl.load(x + r * n + c) * tl.load(weight + c) * FACTOR)

    return kernel


TIMES = {True: times_function(1.0), False: times_function(3.0)}
ONCE, THRICE, HOOKED = times_kernel(1.0), times_kernel(3.0), times_kernel(1.0)
HOOKED.add_pre_run_hook(lambda x, weight, *rest, **named: weight.mul_(1 + 2 * (len(x) >= FEW)))


def scaled_with(kernel, rows, weight):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    kernel[(rows,)](x, weight, out, N, N)
    return out


def shares_of(x, few):
    out = torch.empty(x.shape)
    shares[(len(x),)](x, out, N, N, num_warps=1 if few else 2)
    return out


def largest_of_outside_rows(rows):
    return scaled_by(rows, ROWS[:rows].amax().expand(N).contiguous())


def warps_by_outside_rows(rows):
    return shares_of(ROWS[:rows], ROWS[:rows].max().item() > 100)


def product_of_outside_rows(rows):
    return shares_of(torch.mm(ROWS[:rows], torch.ones(N, N)), few=True)


def longest_of_outside_rows(rows):
    return scaled_by(rows, torch.ones(N) * LENGTHS[:rows].max())


def second_of_one_recipe(rows):
    first, second = torch.randn(N), torch.randn(N)
    return scaled_by(rows, (first if rows < FEW else second) * 2.0)


def swapped_operands(rows):
    a, b = torch.randn(N), torch.randn(N)
    return scaled_by(rows, a - b if rows < FEW else b - a)


def second_result(rows):
    low, high = torch.aminmax(torch.randn(N, 4), dim=1)
    return scaled_by(rows, (low if rows < FEW else high) * 1.0)


def copy_of_another_half(rows):
    both = torch.randn(2 * N)
    low, high = both[:N].clone(), both[N:].clone()
    return scaled_by(rows, low if rows < FEW else high)


def transposed_copy(rows):
    square = torch.randn(16, 16)
    weight = square.clone() if rows < FEW else square.t().contiguous()
    square.clone()  # the last copy of a tensor
    return scaled_by(rows, weight)


def channels_last_weight(rows):
    weight = torch.randn(1, 4, 8, 8)
    if rows < FEW:
        return scaled_by(rows, weight.clone().view(-1))
    moved = weight.contiguous(memory_format=torch.channels_last)
    return scaled_by(rows, moved.permute(0, 2, 3, 1).view(-1))


def channels_last_rows(rows):
    x = torch.randn(rows, 4, 8, 8)
    if rows >= FEW:
        x = x.clone(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    return shares_of(x.reshape(rows, -1).clone(), few=True)


def transposed_destination(rows):
    base = torch.empty(16, 16)
    (base if rows < FEW else base.t()).copy_(SQUARE)
    return scaled_by(rows, base)


def copy_with_a_stride(rows):
    return scaled_by(rows, torch.as_strided_copy(TABLE, (N,), (1 if rows < FEW else 2,)))


@torch.library.custom_op("isobit_tests::times_size", mutates_args=())
def times_size(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight * float(size)


def argument_called_size(rows):
    return scaled_by(rows, times_size(torch.randn(N), 2 if rows < FEW else 3))


def parts_of_other_sizes(rows):
    zeros = 8 if rows < FEW else 32
    return scaled_by(rows, torch.cat([torch.zeros(zeros), torch.ones(N - zeros)]))


def columns_instead_of_lines(rows):
    square = torch.randn(16, 16)
    return scaled_by(rows, (square[PLACES] if rows < FEW else square[:, PLACES]).contiguous())


def columns_are_set(rows):
    weight, at = torch.zeros(16, 16), torch.tensor([1, 5])
    if rows < FEW:
        weight[at] = 1.0
    else:
        weight[:, at] = 1.0
    return scaled_by(rows, weight)


def integers_viewed_as_floats(rows):
    pattern = 0x3F800000 if rows < FEW else 0x40400000
    return scaled_by(rows, torch.full((N,), pattern, dtype=torch.int32).view(torch.float32))


def conjugated(rows):
    weight = torch.randn(N // 2, dtype=torch.complex64)
    weight = weight.clone() if rows < FEW else weight.conj().resolve_conj()
    return scaled_by(rows, torch.view_as_real(weight))


def last_row_is_flagged(rows):
    drawn = torch.randint(0, 1, (rows - 1,), dtype=torch.int32)
    flags = torch.cat([drawn, torch.ones(1, dtype=torch.int32)])
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    by_flag[(rows,)](x, flags, out, N, N)
    return out


def warps_by_the_number_of_some_value(rows):
    x = torch.randn(rows, N)
    return shares_of(x, x[x == 12345.0].shape[0] > 0)


def warps_by_the_number_of_places(rows):
    x = torch.randn(rows, N)
    return shares_of(x, x.gt(100).nonzero().shape[0] > 0)


def statistics_of_the_batch(rows):
    x, mean, variance = torch.randn(rows, N), torch.zeros(N), torch.ones(N)
    torch.nn.functional.batch_norm(x, mean, variance, training=True)
    return scaled_by(rows, mean)


def changed_by_dlpack(rows):
    weight = torch.randn(N)
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight)).mul_(1 + rows // FEW)
    return scaled_by(rows, weight)


def storage_is_filled(rows):
    weight = torch.randn(N)
    weight.untyped_storage().fill_(1 if rows < FEW else 64)
    return scaled_by(rows, weight)


def changed_in_a_part_of_its_storage(rows):
    weight = torch.randn(N)
    torch.empty(0).set_(weight.untyped_storage()[0:128]).mul_(1.0 if rows < FEW else 3.0)
    return scaled_by(rows, weight)


def changed_in_a_thread(rows):
    weight = torch.randn(N)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(weight.mul_, 1.0 if rows < FEW else 3.0).result()
    return scaled_by(rows, weight)


def changed_in_a_thread_between_launches(rows):
    weight = torch.randn(N)
    scaled_by(rows, weight)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(weight.mul_, 1.0 if rows < FEW else 3.0).result()
    return scaled_by(rows, weight)


def changed_by_a_hook(rows):
    return scaled_with(HOOKED, rows, torch.randn(N))


def function_of_a_factory(rows):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    changed_by[(rows,)](x, out, N, TIMES[rows < FEW], N)
    return out


def kernel_of_a_factory(rows):
    return scaled_with(ONCE if rows < 1000 else THRICE, rows, torch.ones(N))


def warps_by_a_row_as_a_list(rows):
    """each row count reads another row of a tensor from outside, through no operator of torch"""
    return shares_of(torch.randn(rows, N), few=ROWS[rows].tolist()[0] > 0)


def another_half_of_empty_memory(rows):
    """the other half of the storage holds nothing"""
    both, square = torch.empty(2, N), torch.randn(16, 16)
    both[1].copy_((square[PLACES] if rows < FEW else square[:, PLACES]).reshape(-1))
    return scaled_by(rows, both[1])


def precision_by_rows(rows):
    torch.set_float32_matmul_precision("highest" if rows < FEW else "medium")
    weight = torch.randn(N, 32) @ torch.randn(32, 1)
    torch.set_float32_matmul_precision("highest")
    return scaled_by(rows, weight)


def generator_was_used(rows):
    generator = torch.Generator().manual_seed(1)
    if rows >= FEW:
        torch.rand(5, generator=generator)
    return scaled_by(rows, torch.randn(N, generator=generator))


def another_weight_of_large_batches(rows):
    """at row counts that no certificate executes"""
    low, high = torch.randn(2 * N).view(2, N).unbind()
    return scaled_by(rows, (low if rows < 5000 else high).clone())


# Right ones, next to these.


def weight_by_exponentials(rows):
    """what torch computes of many rows may be an ulp off from what it computes of few"""
    x, out = torch.randn(rows, N).exp().sigmoid(), torch.empty(rows, N)
    scaled_rows[(rows,)](x, torch.randn(N).softmax(0), out, N, N)
    return out


def views_of_one_weight(rows):
    """the same argument is another part of a tensor at every launch"""
    weights, x, out = torch.randn(3, N), torch.randn(rows, 3, N), torch.empty(3, rows, N)
    for at in range(3):
        each = x[:, at].clone()
        scaled_rows[(rows,)](each, weights[at], out[at], N, N)
    return out[0], out[1], out[2]


def numbers_of_all_kinds(rows):
    x = torch.empty(rows, N).uniform_(-1, 1) + torch.rand_like(torch.empty(rows, N))
    x = x * torch.bernoulli(torch.full((rows, N), 0.5)) + torch.empty(rows, N).exponential_()
    x = torch.nn.functional.dropout(x, 0.1) + torch.normal(0.0, 2.0, (rows, N))
    flags = torch.randint(0, 2, (rows,), dtype=torch.int32)
    out = torch.empty(rows, N)
    by_flag[(rows,)](x, flags, out, N, N)
    return out


def weight_read_by_python(rows):
    weight = torch.randn(N)
    return shares_of(torch.randn(rows, N), few=weight.max().item() > 100)


def weight_after_draws_of_rows(rows):
    """what is drawn before a weight is as much as there are rows, by operators of every kind"""
    torch.multinomial(torch.ones(4), rows, replacement=True)
    torch.randperm(rows)
    x = torch.rand_like(torch.empty(rows, N), dtype=torch.bfloat16)
    weight, out = torch.randn(N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, weight, out, N, N)
    return out
