"""One kernel of linear, compiled twice: for sizes that are given at launch, and for one shape."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.running.compile import Compiler, specialise
from isobit.foundation import backends
from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.sums import add_dot, merge_columns
from isobit.order.engines import ENGINE_OF_TARGET
from isobit.order.plan import FeaturePlan
from tests.certifying.running import raw

LEAF = 256


@triton.jit(do_not_specialize=["M", "N", "K"])
def linear_by_sizes(
    x,
    weight,
    y,
    M,
    N,
    K,
    SEGMENTS: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = x · weightᵀ in the order of isobit.linear; a leaf is a multiple of BLOCK_K, and so is a segment."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k, length = tl.arange(0, BLOCK_K), K // SEGMENTS
    which = tl.arange(0, SEGMENTS)[None, None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N, SEGMENTS), tl.float32)
    for segment in range(SEGMENTS):
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for leaf in range(0, length, LEAF):
            run = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for at in range(leaf, tl.minimum(leaf + LEAF, length), BLOCK_K):
                place = segment * length + at + k
                a = tl.load(x + row * K + place[None, :], mask=row < M, other=0.0)
                b = tl.load(weight + column * K + place[:, None], mask=column < N, other=0.0)
                run = add_dot(a, b, run)
            total = tl.where(leaf == 0, run, total + run)
        sums = tl.where(which == segment, total[:, :, None], sums)
    flat = tl.reshape(sums, (BLOCK_M * BLOCK_N, SEGMENTS))
    merged = tl.reshape(merge_columns(flat, BLOCK_M * BLOCK_N, SEGMENTS), (BLOCK_M, BLOCK_N))
    inside = (row < M) & (column < N)
    tl.store(y + row * N + column, round_once(merged, y.dtype.element_ty), mask=inside)


def run_call(target, kernel, call, grid):
    """Compile a call, run it in the PTX machine, and return the machine and the PTX."""
    made = Compiler(target, resources=False).compile(kernel, call)
    machine = Machine(made.program, ENGINE_OF_TARGET[target], names=False, races=False)
    buffers = {}
    given = [
        buffers.setdefault(v.data_ptr(), Buffer(raw(v))) if isinstance(v, torch.Tensor) else v
        for v in call.arguments
    ]
    machine.run(grid, given, shared_bytes=made.shared_bytes)
    return machine, made.ptx


def made_for(call, names):
    """Return a call whose named arguments are constants: the kernel is compiled for these sizes."""
    order = list(call.signature)
    signature = {n: "constexpr" if n in names else kind for n, kind in call.signature.items()}
    constants = {**call.constants, **{(order.index(n),): call.bound[n] for n in names}}
    attributes = {at: v for at, v in call.attributes.items() if order[at[0]] not in names}
    return replace(call, signature=signature, constants=constants, attributes=attributes)


def launch_by_sizes(target, x, weight, tile, *, constant=(), wrong=0):
    """Return y by the kernel in the PTX machine, and its PTX; `constant` names the sizes that it is compiled for."""
    (rows, extent), columns = x.shape, len(weight)
    y = torch.full((rows, columns), torch.nan, dtype=x.dtype)
    leaf = LEAF if x.dtype == torch.float32 else 1 << 20
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    constants = {"SEGMENTS": wrong or FeaturePlan(extent).count, "LEAF": leaf, **blocks}
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    given = (x, weight, y, rows, columns, extent)
    call = specialise(linear_by_sizes, target, given, {**constants, **options})
    grid = (-(-rows // tile[0]), -(-columns // tile[1]))
    _, text = run_call(target, linear_by_sizes, made_for(call, constant), grid)
    return y, text


class Specialising:
    """A backend that compiles every launch for its number of rows, and runs it in the PTX machine."""

    def __init__(self, target):
        self.target, self.engine = target, ENGINE_OF_TARGET[target]
        self.made = []

    def launch(self, kernel, grid, args, constants, options):
        call = specialise(kernel, self.target, args, {**constants, **options})
        names = tuple(name for name in ("m", "first_tile") if call.signature.get(name) == "i32")
        if kernel.__name__ == "merge_segments":  # m.to(...) is of a run-time number
            names = ()
        self.made.append((kernel.__name__, names))
        run_call(self.target, kernel, made_for(call, names), grid)


def run_specialised(target, function, *given):
    """Return function(*given) by kernels that are compiled for the number of rows, and which these were."""
    backend = Specialising(target)
    with backends.use(backend):
        return function(*given), backend.made
