"""wgmma of sm_90: whole GEMMs have the plan's names and bits, and what a GPU would not order is refused."""

import pytest

from isobit.certifying.running.refusals import DivergentBranchError, OpcodeError, RaceError
from tests.certifying import asynchronous_kernels as kernels

SMALL = (90, "bf16", 64, 64, 32, 160)  # target, type, BM, BN, BK, K: five steps of the loop
SHAPES = [
    {"dtype": "bf16", "BM": 64, "BN": 64, "BK": 32, "K": 160},
    {"dtype": "fp16", "BM": 64, "BN": 32, "BK": 64, "K": 128, "trans": (1, 1), "stages": 4},
    {"dtype": "bf16", "BM": 128, "BN": 16, "BK": 32, "K": 64, "warps": 8, "stages": 1},
    {"dtype": "bf16", "BM": 64, "BN": 128, "BK": 16, "K": 64, "trans": (0, 1), "M": 70},
    {"dtype": "fp32", "BM": 64, "BN": 32, "BK": 32, "K": 64},  # tf32
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm_is_the_plan(shape):
    assert kernels.run_gemm(90, **shape) == (0, 0)


def test_operand_from_registers_is_the_plan():
    assert kernels.run_two_dots(90, 64, 32, 64, 96, 2, 4) == (0, 0)


TILES = [(64, 16), (64, 64), (128, 32), (128, 128), (64, 256), (256, 64)]


@pytest.mark.full
@pytest.mark.parametrize("BK", [16, 32, 64, 128])
@pytest.mark.parametrize(("BM", "BN"), TILES)
@pytest.mark.parametrize("target", [90, 100])
def test_every_tile_is_the_plan(target, BM, BN, BK):
    """Transposes, warps, stages and the operand type go round with the tile."""
    turn = TILES.index((BM, BN)) + BK // 16
    stages = 2 if (BM + BN) * BK > 20_000 else 1 + turn % 4
    shape = {"trans": (turn & 1, turn >> 1 & 1), "warps": 4 << (turn >> 2 & 1), "stages": stages}
    dtype = "fp16" if turn % 3 == 0 else "bf16"
    assert kernels.run_gemm(target, dtype, BM, BN, BK, 3 * BK, **shape) == (0, 0)


@pytest.mark.parametrize(
    ("pattern", "which"),
    [
        (r"wgmma\.fence", 0),
        (r"wgmma\.commit_group", 0),
        (r"wgmma\.wait_group.* 1;", 0),
        (r"wgmma\.wait_group.* 0;", 0),
        (r"fence\.proxy\.async", 0),
        (r"cp\.async\.wait_group", 0),
        (r"bar\.sync", 1),  # after cp.async.wait_group: the copies of other threads
        (r"bar\.sync", 2),  # before cp.async overwrites what wgmma read
    ],
)
def test_missing_order_is_a_race(pattern, which):
    with pytest.raises(RaceError, match="PTX line"):
        kernels.run_gemm(*SMALL, edit=kernels.without(pattern, which))


def test_race_names_both_places():
    with pytest.raises(RaceError) as caught:
        kernels.run_gemm(*SMALL, edit=kernels.without(r"wgmma\.wait_group.* 0;"))
    assert caught.value.received.count("PTX line") == 2
    assert "wgmma.mma_async" in caught.value.received


def test_fence_of_the_second_dot_is_needed():
    with pytest.raises(RaceError, match=r"wgmma\.fence"):
        kernels.run_two_dots(90, 64, 32, 64, 96, 2, 4, edit=kernels.without(r"wgmma\.fence", 1))


DESCRIPTOR = r"(or\.b64\s+%rd\d+, %rd\d+, )(-?\d{15,})"
# The two mma of a block exchange their k; the stride of eight rows is 16 bytes shorter.
CHANGES = {
    "swapped": kernels.exchanged("9223371899415822336", "9223371899415822334"),
    "stride": kernels.replaced(DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) - (1 << 32)}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_text_has_other_names(change):
    bits, names = kernels.run_gemm(*SMALL, edit=CHANGES[change])
    assert names > 0
    assert bits > 0


def test_sum_that_starts_anew_has_other_names():
    edit = kernels.replaced(r"(mov\.pred\s+%p\d+, )-1", lambda m: f"{m[1]}0")
    assert kernels.run_gemm(*SMALL, edit=edit)[1] == 64 * 64


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (kernels.replaced(DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) | 1 << 49}"), "base offset"),
        (kernels.replaced(DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) & (1 << 61) - 1}"), "swizzle"),
        (kernels.replaced(r", 1, 1, 0, 0;", ", -1, 1, 0, 0;"), "negated"),
        (kernels.replaced(r"m64n64k16\.f32\.bf16\.bf16", "m64n64k16.f16.f16.f16"), "opcode"),
    ],
)
def test_unknown_form_is_refused(edit, error):
    with pytest.raises(Exception, match=error):
        kernels.run_gemm(*SMALL, edit=edit)


def test_some_warps_are_refused():
    edit = kernels.replaced(r"wgmma\.commit_group", "@%p0 wgmma.commit_group")
    thread = kernels.replaced(
        r"mov\.u32\s+(%r\d+), %tid\.x;", lambda m: f"{m[0]} setp.lt.u32 %p0, {m[1]}, 32;"
    )
    with pytest.raises(DivergentBranchError):
        kernels.run_gemm(*SMALL, edit=lambda ptx: edit(thread(ptx)))


def test_fp8_is_refused_by_name():
    with pytest.raises(OpcodeError, match="e4m3"):
        kernels.run_gemm(*SMALL, edit=kernels.replaced("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3"))
