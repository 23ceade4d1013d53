"""Theorem: digits of an exact sum on a GPU are the true sum's, of any number of tiles, and cannot overflow.

1. The number that a state holds is the CPU's, for sizes around a tile and around what a program adds.
2. A value adds less than 2^32 to a digit, at every place, so 2^28 values fit in int64 without a carry.
3. Compiled code has no barrier in its loop over tiles, and few for each value.
"""

import math
import re

import pytest
import torch

pytest.importorskip("triton")

import isobit.certifying
from benchmarks.machine_code import Calls
from isobit.certifying.running.backends import compiler_for
from isobit.foundation import backends
from isobit.ops.exact_sum import portable, triton_state
from isobit.ops.exact_sum.op import exact_state
from isobit.ops.gpu import executors
from isobit.ops.gpu.tiles import DEFAULT
from tests.sweeps import mostly_full

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGETS = ["sm_80", "sm_90", "sm_100"]
TILE = DEFAULT.size
TILES = 4  # of a program in most tests: the interpreter is slow
PROGRAM = TILE * triton_state.TILES
SPECIAL = [math.nan, math.inf, -math.inf, -math.inf, -0.0]
EXPONENTS = [0, 1, *range(100, 132), 253, 254]  # 32 neighbours have every shift within a digit
MOST_BARRIERS = 0.01  # for each value
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
of_forms = pytest.mark.parametrize("squared", [False, True], ids=["values", "squares"])


def wide(size, dtype):
    generator = torch.Generator().manual_seed(size)
    shift = torch.randint(-149, 126, (size,), generator=generator)
    x = torch.ldexp(torch.randn(size, generator=generator), shift).to(dtype)
    return torch.where(x.isfinite(), x, -1.0)


def state_of(x, squared, kind="interpreter", target="sm_90", check=False):
    executors.prepare("exact_state", x.dtype)
    with isobit.certifying.executing(kind, target=target, check=check):
        return torch.ops.isobit.triton_exact_state(x, squared)


def held(state):
    """Return the number that a state's digits hold, in units of 2^LOWEST, and its counts."""
    *digits, nans, above, below = state.tolist()
    return sum(digit << 32 * at for at, digit in enumerate(digits)), nans, above, below


def check_states(x, squared):
    assert held(state_of(x, squared)) == held(exact_state([x], squared))
    x[-len(SPECIAL) :] = torch.tensor(SPECIAL[: len(x)])
    assert held(state_of(x, squared)) == held(exact_state([x], squared))


@of_forms
@of_dtypes
@pytest.mark.parametrize("tiles", [1, 3, 2 * TILES])  # the last is two programs
def test_a_state_holds_the_number_of_the_cpu(tiles, dtype, squared, monkeypatch):
    monkeypatch.setattr(triton_state, "TILES", TILES)
    check_states(wide(tiles * TILE + 5, dtype), squared)


@of_forms
@pytest.mark.parametrize("size", [1, TILE, TILE - 1, TILES * TILE, TILES * TILE + 1])
def test_a_state_at_the_end_of_a_tile_and_of_a_program(size, squared, monkeypatch):
    monkeypatch.setattr(triton_state, "TILES", TILES)
    check_states(wide(size, torch.float32), squared)


@pytest.mark.full
@of_forms
@of_dtypes
@pytest.mark.parametrize("size", [PROGRAM - 1, PROGRAM, PROGRAM + 1, 2 * PROGRAM + TILE + 5])
def test_a_state_of_the_shipped_number_of_tiles(size, dtype, squared):
    check_states(wide(size, dtype), squared)


@of_forms
@of_dtypes
def test_compiled_code_has_the_same_digits(dtype, squared, monkeypatch):
    """Three programs, of two tiles each, the last of which has one ragged tile."""
    monkeypatch.setattr(triton_state, "TILES", 2)
    x = wide(4 * TILE + 77, dtype)
    x[TILE : TILE + len(SPECIAL)] = torch.tensor(SPECIAL)
    expected, target = state_of(x, squared), TARGETS[DTYPES.index(dtype)]
    assert held(expected) == held(exact_state([x], squared))
    assert torch.equal(state_of(x, squared, "machine", target, check=True), expected)


@pytest.mark.parametrize("step", mostly_full([1, 5], [5]))
@pytest.mark.parametrize(("squared", "sign"), [(False, 1), (False, -1), (True, -1)])
def test_no_digit_overflows(squared, sign, step):
    """Every place of the largest fraction; a lane adds several of them, and carries nothing."""
    count, pieces, places = TILE + 8, [], set()
    for exponent in EXPONENTS[::step]:
        bits = torch.tensor([exponent << 23 | 0x7FFFFF], dtype=torch.int32)
        values = (sign * bits.view(torch.float32)).repeat(count)
        state = state_of(values, squared)
        assert held(state) == held(exact_state([values], squared))
        digits = state.tolist()[: portable.DIGITS]
        assert all(digit % count == 0 for digit in digits)  # of equal values: nothing was carried
        pieces += [abs(digit) // count for digit in digits]
        places.add(next(at for at, digit in enumerate(digits) if digit))
    print(f"largest piece {max(pieces)}, {len(places)} lowest digits")
    assert 2**31 < max(pieces) < 2**32
    assert 2**32 * portable.MOST_AT_ONCE < 2**63
    assert len(places) >= 3


def loops_with_loads(ptx):
    """Return the text of each loop that loads from global memory."""
    lines, labels, found = ptx.splitlines(), {}, []
    for at, line in enumerate(lines):
        label = re.match(r"(\$L__BB\w+):", line)
        if label:
            labels[label[1]] = at
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if jump and jump[1] in labels:
            body = "\n".join(lines[labels[jump[1]] : at])
            found += [body] if "ld.global" in body else []
    return found


def barriers_of(dtype, squared, target="sm_90"):
    """Return (barriers in each loop that loads, barriers for each value) of a compiled kernel."""
    executors.prepare("exact_state", dtype)
    backend = Calls(target)
    with backends.use(backend):
        torch.ops.isobit.triton_exact_state(torch.empty(PROGRAM, dtype=dtype), squared)
    ((kernel, call),) = backend.found.values()
    ptx = compiler_for(target).compile(kernel, call).ptx
    inside = [text.count("bar.sync") for text in loops_with_loads(ptx)]
    return inside, ptx.count("bar.sync") / (TILE * triton_state.TILES)


@of_forms
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["f32", "bf16"])
def test_the_loop_over_tiles_has_no_barrier(dtype, squared):
    """It was 68 barriers for 512 values, 0.13 for each."""
    inside, each = barriers_of(dtype, squared)
    print(f"{each:.4f} barriers for each value, {inside} in the loop")
    assert inside == [0]
    assert 0 < each < MOST_BARRIERS


def test_a_program_of_one_tile_has_too_many_barriers(monkeypatch):
    monkeypatch.setattr(triton_state, "TILES", 1)
    _, each = barriers_of(torch.float32, True)
    assert each > MOST_BARRIERS
