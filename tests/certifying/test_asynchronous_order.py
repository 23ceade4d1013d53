"""Barrier objects, matrix descriptors and meeting points of branches, each by itself."""

import numpy as np
import pytest

from isobit.certifying.machine.control import meeting_points
from isobit.certifying.machine.mbarriers import Arrival, Mbarriers
from isobit.certifying.machine.tensor_core import tcgen05_descriptor, wgmma_descriptor
from isobit.certifying.ptx import parse
from isobit.errors import UnsupportedError


def barrier(count=1):
    made = Mbarriers(ValueError)
    made.init(0, count, thread=0)
    return made.get(0, thread=0)


def test_wait_ends_the_work_that_arrives():
    one = barrier()
    one.coming.append(Arrival(1, 0, 7, "tcgen05.mma"))
    assert [each.ends for each in one.wait(0)] == [7]
    assert one.phase == 1


def test_wait_for_bytes_needs_all_of_them():
    one = barrier()
    one.arrive(1, announced=96)
    one.coming.append(Arrival(0, 32, 1, "bulk copy"))
    with pytest.raises(ValueError, match="nobody completes"):
        one.wait(0)
    one.coming.append(Arrival(0, 64, 2, "bulk copy"))
    assert [each.ends for each in one.wait(0)] == [1, 2]


def test_phase_before_the_first_has_ended():
    assert barrier().wait(1) == []


def test_wait_that_depends_on_time_is_refused():
    """Parity 1 before the first arrival: yes if the work still runs, no if it has ended."""
    one = barrier()
    one.coming.append(Arrival(1, 0, 0, "tcgen05.mma"))
    with pytest.raises(ValueError, match="by when asynchronous work ends"):
        one.wait(1)


def test_two_phases_in_flight_are_refused():
    one = barrier()
    one.coming += [Arrival(1, 0, 0, "tcgen05.mma"), Arrival(1, 0, 1, "tcgen05.mma")]
    with pytest.raises(ValueError, match="next phase may end"):
        one.wait(0)


def test_barrier_of_another_thread_needs_bar_sync():
    made = Mbarriers(ValueError)
    made.init(8, 1, thread=0)
    with pytest.raises(ValueError, match=r"without bar\.sync"):
        made.get(8, thread=1)
    made.synchronise()
    assert made.get(8, thread=1).phase == 0


@pytest.mark.parametrize("line", [32, 64, 128])
@pytest.mark.parametrize("k_major", [True, False])
def test_swizzle_is_a_permutation_of_the_tile(line, k_major):
    """Every element has an address of its own, inside the tile, and 16 bytes stay together."""
    code = {32: 3, 64: 2, 128: 1}[line]
    stride, leading = 8 * line, 8 * line * 2
    bits = code << 62 | (stride >> 4) << 32 | (leading >> 4) << 16 | 4096 >> 4
    found = wgmma_descriptor(bits).addresses(line // 2, 16, 2, k_major)
    assert len(np.unique(found)) == found.size
    rows = found if k_major else found.T
    assert (np.diff(rows.reshape(-1, 8)) == 2).all()
    assert found.min() >= 4096
    assert (tcgen05_descriptor(bits & (1 << 61) - 1 | {32: 6, 64: 4, 128: 2}[line] << 61 | 1 << 46)
            .addresses(line // 2, 16, 2, k_major) == found).all()  # fmt: skip


@pytest.mark.parametrize(
    "bits", [0, 1 << 62 | 1 << 49, 1 << 62 | 1 << 46, 1 << 62 | 1 << 14, 1 << 61]
)
def test_unknown_descriptor_is_refused(bits):
    with pytest.raises(UnsupportedError):
        wgmma_descriptor(bits)


BRANCHES = """.version 8.0
.target sm_100a
.entry k()
.reqntid 64
{
  .reg .pred %p<3>; .reg .b32 %r<3>;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 32;
  bra.uni HEAD;
BACK:
  add.s32 %r2, %r2, 1;
  setp.lt.u32 %p2, %r2, 3;
  @%p2 bra HEAD;
  bra.uni DONE;
HEAD:
  @%p1 bra BACK;
  mov.b32 %r2, 0;
  bra.uni BACK;
DONE:
  @%p1 bra LAST;
  mov.b32 %r2, 1;
LAST:
  ret;
}"""


def test_branches_meet_also_before_their_place_in_the_text():
    program = parse(BRANCHES)
    lines = {each.index: each.line for each in program.instructions}
    found = {lines[a]: lines[b] for a, b in meeting_points(program).items()}
    assert found == {13: 14, 16: 11, 20: 23}
