"""A branch over a few register operations is a select: same bits, names that do not depend on data, no refusal."""

import numpy as np
import pytest

from isobit.compiled.machine import Buffer, Machine
from isobit.compiled.machine.short_branches import with_guards
from isobit.compiled.ptx.parser import parse
from isobit.compiled.refusals import DataBranchError

PTX = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .u64 kernel_param_1
)
.reqntid 32
{{
	.reg .pred %p<4>;
	.reg .b32 %r<20>;
	.reg .b64 %rd<8>;
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd2, %rd3;
	ld.global.b32 %r2, [%rd4];
	mul.rn.f32 %r3, %r2, 0f40000000;
	setp.lt.f32 %p1, %r2, 0f3F800000;
	@%p1 bra $L1;
{body}
$L1:
	st.global.b32 [%rd5], %r3;
	ret;
}}
"""
PLAIN = "	mov.b32 %r4, 0f3F800000;\n	add.rn.f32 %r3, %r2, %r4;"
VALUES = np.linspace(-2, 4, 32, dtype=np.float32)


def run(body, values):
    out = Buffer(np.zeros(32, np.float32))
    Machine(parse(PTX.format(body=body))).run((1, 1, 1), [Buffer(values.copy()), out])
    return out.data.view(np.float32), out.element_names()


def test_bits_are_those_of_the_branch_and_names_do_not_depend_on_data():
    found, names = run(PLAIN, VALUES)
    assert np.array_equal(found, np.where(VALUES < 1, VALUES * 2, VALUES + 1))
    assert len({*found.tolist()}) > 20  # both ways were taken, inside one warp
    others = run(PLAIN, VALUES[::-1].copy())[1]
    assert np.array_equal(names, others)
    assert len(set(names.tolist())) == 32  # each of its own input


def test_another_operation_under_the_branch_is_another_name():
    names = run(PLAIN, VALUES)[1]
    changed = run(PLAIN.replace("3F800000", "3F000000"), VALUES)[1]
    assert not (names == changed).any()


@pytest.mark.parametrize(
    "body",
    [
        "	st.global.b32 [%rd5], %r2;",  # memory
        "	setp.gt.f32 %p1, %r2, 0f40000000;\n	add.rn.f32 %r3, %r2, %r2;",  # the guard itself
        "	@%p2 add.rn.f32 %r3, %r2, %r2;",  # a guard of its own
        "$L2:\n	add.rn.f32 %r3, %r2, %r2;",  # somebody may jump between
        "	add.rn.f32 %r3, %r2, %r2;\n" * 33,  # long
        "	shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;",  # another thread's register
    ],
    ids=["memory", "guard", "guarded", "label", "long", "shuffle"],
)
def test_other_branches_on_data_are_refused(body):
    with pytest.raises(DataBranchError):
        run(body, VALUES)


def test_a_register_from_the_round_before_keeps_its_guard():
    program = parse(PTX.format(body="	add.rn.f32 %r4, %r4, %r2;\n	add.rn.f32 %r3, %r2, %r4;"))
    guards = [each.guard for each in with_guards(program).instructions if each.parts[0] == "add"]
    assert [guard is not None for guard in guards[-2:]] == [True, True]
    plain = [each.guard for each in with_guards(parse(PTX.format(body=PLAIN))).instructions]
    assert plain[9:12] == [None, None, plain[11]]
    assert plain[11].negated
