"""Functions as careless or hostile users write them, for `isobit.certify`: each is one habit."""

import threading

import torch
import triton
import triton.language as tl

from tests.certifying.certify_subjects import make, norm_kernel, sum_kernel

WIDTH = 64


@triton.jit
def exponential_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.exp2(tl.load(x + at)))


@triton.jit
def in_place_kernel(x, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(x + at, tl.load(x + at) * 2.0 + 1.0)


@triton.jit
def while_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.sum(tl.load(x + at))
    while total > 1.0:
        total = total * 0.5
    tl.store(out + tl.program_id(0), total)


@triton.jit
def printing_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at)
    tl.device_print("value", value)
    tl.store(out + at, value + 1.0)


@triton.jit
def asserting_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at)
    tl.device_assert(value < 100.0, "large")
    tl.store(out + at, value + 1.0)


@triton.jit
def shift_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size) + 1.0, mask=at < size)


@triton.heuristics({"WARPS": lambda given: 2})
@triton.jit
def heuristic_kernel(x, out, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at)) * WARPS)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 1 << block}, num_warps=warps)
        for block in range(5, 11)
        for warps in (1, 2, 4)
    ],
    key=["size"],
)
@triton.jit
def many_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size) + 1.0, mask=at < size)


def exponential(rows):
    x = make(rows)
    out = torch.empty_like(x)
    exponential_kernel[(rows,)](x, out, WIDTH)
    return out


def in_place(rows, num_warps=2):
    x = make(rows)
    in_place_kernel[(rows,)](x, WIDTH, num_warps=num_warps)
    return x


def in_place_twice(rows):
    x = make(rows)
    for _ in range(2):
        in_place_kernel[(rows,)](x, WIDTH, num_warps=2)
    return x


def strided(rows):
    x = torch.randn(rows, 2 * WIDTH)[:, ::2].contiguous()
    wide = torch.empty(rows, WIDTH)
    norm_kernel[(rows,)](x, wide, rows, WIDTH)
    return wide


def reversed_view(rows):
    x = torch.randn(WIDTH, rows).t().contiguous()
    out = torch.empty(rows, WIDTH)
    norm_kernel[(rows,)](x, out, rows, WIDTH)
    return out


def loops_on_data(rows):
    x, out = make(rows), torch.empty(rows)
    while_kernel[(rows,)](x, out, WIDTH)
    return out


def prints(rows):
    x = make(rows)
    print("from the wrapper", rows)
    out = torch.empty_like(x)
    printing_kernel[(rows,)](x, out, WIDTH)
    return out


def asserts(rows):
    x = make(rows)
    out = torch.empty_like(x)
    asserting_kernel[(rows,)](x, out, WIDTH, debug=True)
    return out


def asks_the_card(rows):
    """A wrapper that is written for a GPU: it checks, asks, and makes its output there."""
    x = torch.randn(rows, WIDTH, device="cuda")
    assert x.is_cuda
    assert torch.cuda.get_device_capability(x.device) == (8, 0)
    assert torch.cuda.get_device_properties("cuda").multi_processor_count == 108
    # A CPU build of torch does not have this question.
    assert torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()) == 0
    assert torch.accelerator.current_accelerator().type == "cuda"
    out = torch.empty(x.shape, device=torch.device("cuda", 0))
    with torch.cuda.device(x.device):
        norm_kernel[(rows,)](x, out, rows, WIDTH)
    return out.to("cuda")


def calls_cuda(rows):
    x = make(rows).cuda()
    out = torch.empty_like(x)
    norm_kernel[(rows,)](x, out, rows, WIDTH)
    return out


def returns_dict(rows):
    return {"out": in_place(rows)}


def returns_tuple(rows):
    return in_place(rows), exponential(rows)


def returns_some(rows):
    return in_place(rows), None


def returns_number(rows):
    return float(in_place(rows).sum())


def heuristic(rows):
    x, out = make(rows), torch.empty(rows)
    heuristic_kernel[(rows,)](x, out, WIDTH)
    return out


def lambda_grid(rows, BLOCK=64):
    x = make(rows)
    out = torch.empty_like(x)
    shift_kernel[lambda given: (triton.cdiv(x.numel(), given["BLOCK"]),)](
        x, out, x.numel(), BLOCK=BLOCK
    )
    return out


def many(rows):
    x = make(rows)
    out = torch.empty_like(x)
    many_kernel[lambda given: (triton.cdiv(x.numel(), given["BLOCK"]),)](x, out, x.numel())
    return out


def torch_compiled(rows):
    x = make(rows)
    doubled = torch.compile(lambda t: t * 2.0)(x)
    out = torch.empty_like(x)
    norm_kernel[(rows,)](doubled, out, rows, WIDTH)
    return out


def overlapping(rows):
    """The kernel reads a view and writes another one of the same storage, one element further."""
    x = torch.randn(rows * WIDTH + 1)
    size = rows * WIDTH
    shift_kernel[(triton.cdiv(size, 64),)](x[:-1], x[1:], size, BLOCK=64)
    return x[1:].view(rows, WIDTH)


def two_views(rows):
    """Two views of one storage that do not overlap: read the left half of a row, write the right one."""
    both = torch.randn(2, rows, WIDTH)
    norm_kernel[(rows,)](both[0], both[1], rows, WIDTH)
    return both[1]


def launches_in_thread(rows):
    out = torch.empty(rows)
    x = make(rows)
    thread = threading.Thread(target=lambda: sum_kernel[(rows,)](x, out, WIDTH))
    thread.start()
    thread.join()
    return out


def interrupts(rows):
    exponential(rows)
    raise KeyboardInterrupt


def exits(rows):
    exponential(rows)
    raise SystemExit(3)


def zero_columns(rows):
    x, out = torch.randn(rows, 0), torch.empty(rows, 0)
    shift_kernel[(1,)](x, out, 0, BLOCK=64)
    return out


def zero_programs(rows):
    x = make(rows)
    out = torch.empty_like(x)
    shift_kernel[(0,)](x, out, 0, BLOCK=64)
    return out


def grows_input(rows, cache=[]):  # noqa: B006
    """A tensor that is kept from call to call, and read by the next one."""
    if not cache:
        cache.append(torch.zeros(1, WIDTH))
    x = make(rows) + cache[0]
    out = torch.empty_like(x)
    norm_kernel[(rows,)](x, out, rows, WIDTH)
    cache[0] = cache[0] + 1.0
    return out
