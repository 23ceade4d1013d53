"""Kernels whose rows depend on the batch: by what torch computes before the launch, or by calls before this one."""

import numpy as np
import torch
import triton
import triton.language as tl

from tests.certifying.wrong_inputs import N, gated, scaled_rows

LARGE = 5000  # more rows than any certificate executes
TABLE = torch.randn(1 << 16)
WEIGHTS = torch.randn(2, N)
OTHER = torch.randn(N)
ALIASED = torch.randn(N)
ALIAS = ALIASED.numpy()
SUMS = torch.zeros(4096, N)
_kept = {}


@triton.jit
def sum_from_first(x, first, out, n, BLOCK: tl.constexpr):
    """adds the blocks of a row from block `first` on, and then those before it"""
    r = tl.program_id(0)
    total = 0.0
    for j in range(0, n, BLOCK):
        at = (j + first * BLOCK) % n + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + r * n + at), axis=0)
    tl.store(out + r, total)


@triton.jit
def two_outputs(x, a, b, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    at = r * n + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(a + at, value + 1.0)
    tl.store(b + at, value + 2.0)


@triton.jit
def add_to(x, sums, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    total = tl.load(sums + at) + tl.load(x + at)
    tl.store(sums + at, total)
    tl.store(out + at, total)


def scaled_by(rows, weight):
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, weight, out, N, N)
    return out


def end_of_a_range(rows):
    """the end of linspace is a value, not a size"""
    return scaled_by(rows, torch.linspace(0.0, 1.0 if rows < 16 else 2.0, N))


def weight_below_rows(rows):
    """the weight is masked by a comparison with the number of rows"""
    return scaled_by(rows, torch.where(torch.arange(N) < rows, WEIGHTS[0], 0.0))


def weight_of_integers(rows):
    """integers that follow the number of rows become floats"""
    return scaled_by(rows, (torch.arange(N) + rows).float())


def weight_at_an_index(rows):
    """integers that follow the number of rows say which elements of a table are the weight"""
    return scaled_by(rows, TABLE[torch.arange(N) + rows])


def weight_at_a_multiple_of_rows(rows):
    """the weight is a view of a table that does not grow with the rows"""
    return scaled_by(rows, TABLE[16 * rows : 16 * rows + N])


def weight_with_a_stride_of_rows(rows):
    """likewise, every so many elements"""
    return scaled_by(rows, TABLE.as_strided((N,), (rows,)).clone())


def weight_by_seed(rows):
    """the weight is drawn by a generator whose seed is the number of rows"""
    return scaled_by(rows, torch.randn(N, generator=torch.Generator().manual_seed(rows)))


def copy_of_another_weight(rows):
    """one of two tensors from outside, copied by torch"""
    return scaled_by(rows, (OTHER if rows < 16 else ALIASED) * 2)


def copy_of_an_array(rows):
    """an array of numpy, which is not a tensor from outside, copied by torch"""
    array = np.arange(N, dtype=np.float32) * (1 if rows < 16 else 2)
    return scaled_by(rows, torch.from_numpy(array) + 1)


def weight_that_numpy_knew_before(rows):
    """an array that shares its memory with a weight was made before the function"""
    ALIAS[0] = rows
    return scaled_by(rows, ALIASED)


def less_the_first_row(rows):
    """torch takes the first row from all, which is no operator over rows"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x - x[0], WEIGHTS[0], out, N, N)
    return out


def first_row_expanded(rows):
    """the first row is copied to all"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    gated[(rows,)](x, x[:1].expand(rows, N).contiguous(), out, N, N, N)
    return out


def first_number_of_all(rows):
    """a number of the first row scales all"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x * x.view(-1)[:1], WEIGHTS[0], out, N, N)
    return out


def weight_by_the_seed_of_torch(rows):
    """the weight is drawn after torch's own generator was seeded with the number of rows"""
    torch.manual_seed(rows)
    return scaled_by(rows, torch.randn(N))


@triton.jit
def sum_by_programs(x, out, n, BLOCK: tl.constexpr):
    """begins a sum at another block if the grid has a second row of programs"""
    r = tl.program_id(0)
    total = 0.0
    for j in range(0, n, BLOCK):
        at = (j + (tl.num_programs(1) - 1) * BLOCK) % n + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + r * n + at), axis=0)
    tl.store(out + r, total)


def second_axis_of_large_batches(rows):
    """the grid has a second axis, which is 1 in all small batches"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_by_programs[(rows, triton.cdiv(rows, 2000))](x, out, N, 64)
    return out


def number_of_the_first_call(rows):
    """a number is kept from the first call, and passed at launch: the binary is the same"""
    first = _kept.setdefault("number", 1 if rows < 16 else 2)
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_from_first[(rows,)](x, first + 1, out, N, 64)
    return out


def weight_of_the_first_call(rows):
    """a weight is kept from the first call"""
    return scaled_by(rows, _kept.setdefault("weight", WEIGHTS[0 if rows < 16 else 1].clone()))


def sums_of_calls_before(rows):
    """a workspace from outside is added to and never cleared: the second call has other bits"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    add_to[(rows,)](x, SUMS[:rows], out, N, N)
    return out


def flag_of_large_batches(rows):
    """a boolean argument says whether there are many rows"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_from_first[(rows,)](x, rows > LARGE, out, N, 64)
    return out


def as_many_tiles(rows):
    """a number that says where a sum begins is one of tiles of 2000 rows: a constant of all small batches"""
    x, out = torch.randn(rows, N), torch.empty(rows)
    sum_from_first[(rows,)](x, 2 * triton.cdiv(rows, 2000), out, N, 64)
    return out


def other_weight_of_large_batches(rows):
    """another tensor, of the same binary"""
    return scaled_by(rows, WEIGHTS[0] if rows <= LARGE else WEIGHTS[1])


def rounded_in_large_batches(rows):
    """torch rounds the rows of large batches before the launch"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    x = x if rows <= LARGE else x.bfloat16().float()
    scaled_rows[(rows,)](x, WEIGHTS[0], out, N, N)
    return out


def other_output_of_large_batches(rows):
    """the tensor that is returned is another one"""
    x, a, b = torch.randn(rows, N), torch.empty(rows, N), torch.empty(rows, N)
    two_outputs[(rows,)](x, a, b, N, N)
    return a if rows <= LARGE else b
