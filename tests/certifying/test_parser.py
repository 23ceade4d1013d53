"""The parser reads what Triton emits and refuses what it does not know, with the line."""

import pytest

from isobit.certifying.ptx import Address, Immediate, Pair, Register, Vector, parse
from isobit.certifying.running.refusals import PtxSyntaxError
from tests.certifying.snippets import text

BODY = """
{
  .reg .pred complete;
  waitLoop:
  mov.pred complete, 1;
  @!complete bra.uni waitLoop;
}
{
  .reg .pred complete;
  waitLoop:
  mov.pred complete, 1;
  @!complete bra.uni waitLoop;
}
ld.global.v2.b32 { %r1, %r2 }, [ %o + 0 ];
ld.global.b32 %r3, [%o+-4];
mov.b32 %r4, 0fBF800000; mov.b64 %w1, 0d3FF0000000000000; mov.b32 %r5, 0x10;
mov.b32 %r6, -3;
setp.eq.b32 %p1|%p2, %r1, %r2;
@%p1 bra $L__END;
$L__END:
mov.b32 %d, %r1;
"""


def test_scopes_operands_and_labels():
    program = parse(text(BODY, ()))
    waits = [each for each in program.instructions if each.opcode == "bra.uni"]
    targets = [program.labels[each.operands[0].name] for each in waits]
    assert targets[0] != targets[1]
    guards = {each.guard.register.index for each in waits}
    assert len(guards) == 2
    assert waits[0].guard.negated
    load = next(each for each in program.instructions if each.opcode == "ld.global.v2.b32")
    assert isinstance(load.operands[0], Vector)
    assert isinstance(load.operands[0].items[1], Register)
    minus = next(each for each in program.instructions if each.operands[-1:] and "-4" in each.text)
    assert isinstance(minus.operands[1], Address)
    assert minus.operands[1].offset == -4
    kinds = [each.operands[1] for each in program.instructions if each.opcode.startswith("mov.b")]
    assert Immediate(0xBF800000, "f32") in kinds
    assert Immediate(0x3FF0000000000000, "f64") in kinds
    assert {Immediate(16, "int"), Immediate(-3, "int")} <= set(kinds[:8])
    assert any(isinstance(op, Pair) for each in program.instructions for op in each.operands)


HEAD = """//
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.global .align 4 .b32 table[3] = {1, 2, 0xFF};
.visible .entry k(
  .param .u64 .ptr .global .align 1 k_param_0,  // a pointer
  .param .f32 k_param_1,
  .param .align 64 .b8 k_param_2[128]
)
.maxntid 128, 1, 1
{
  .reg .b32 %r<3>;
  .shared .align 8 .b8 small[24];
  .loc 1 10 3 // kernel.py:10:3
  mov.u32 %r1, %tid.x; /* a comment
  over lines */
  .loc 2 43 17 // standard.py:43:17 @[ kernel.py:7:44 ]
  mov.b32 %r2, %r1;
  .loc 2 50 1, function_name $L__info, inlined_at 1 8 2
  ret;
}
.file 1 "/somewhere/kernel.py"
.file 2 "/lib/standard.py"
.section .debug_info
{
.b8 1
}
"""


def test_head_and_places():
    program = parse(HEAD)
    assert (program.name, program.target, program.threads) == ("k", "sm_90a", 128)
    assert [each.type for each in program.parameters] == ["u64", "f32", "b8"]
    assert program.parameters[2].size == 128
    assert program.shared_bytes == 24
    assert program.variables["table"].data[8:9] == b"\xff"
    first, second, last = program.instructions
    assert first.source == ("/somewhere/kernel.py", 10)
    assert second.source == ("/lib/standard.py", 43)
    assert second.call_sites == (("/somewhere/kernel.py", 7),)
    assert last.call_sites == (("/somewhere/kernel.py", 8),)
    assert second.line == HEAD.splitlines().index("  mov.b32 %r2, %r1;") + 1


def test_calls_of_inlined_code_are_followed_to_the_kernel():
    """The place of a call that is itself inlined is in a `.loc` before it; the last one counts."""
    nested = ".loc 2 60 5, function_name $L__info, inlined_at 1 {line} 3\n"
    nested += ".loc 2 43 17, function_name $L__info, inlined_at 2 60 5\nmov.b32 %r2, %r1;\n"
    program = parse(
        HEAD.replace("  mov.b32 %r2, %r1;\n", nested.format(line=11) + nested.format(line=12))
    )
    _, first, second, _ = program.instructions
    for found, line in ((first, 11), (second, 12)):
        assert found.source == ("/lib/standard.py", 43)
        assert found.call_sites == (("/lib/standard.py", 60), ("/somewhere/kernel.py", line))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mov.b32 %d, %nosuch;", "nosuch"),
        ("bra NOWHERE;", "known label"),
        ("@%r1 mov.b32 %d, %r1;", "guard"),
        (".weird directive;", "weird"),
        ("call foo, (%r1);", "operand"),
        ("mov.b32 %d, [%r1 * 4];", "r1"),
        ("MOV %d, 1;", "MOV"),
        (".reg .b7 %x;", "b7"),
        ("} mov.b32 %d, 1;", "mov"),
    ],
)
def test_unknown_syntax_names_its_line(line, words):
    with pytest.raises(PtxSyntaxError, match=words) as caught:
        parse(text(line, ()))
    assert "PTX line" in str(caught.value)


def test_one_kernel_of_one_dimension():
    with pytest.raises(PtxSyntaxError, match="kernel"):
        parse(".version 8.0\n.target sm_80\n")
    with pytest.raises(PtxSyntaxError, match="along x"):
        parse(HEAD.replace(".maxntid 128, 1, 1", ".maxntid 64, 2, 1"))


@pytest.mark.parametrize("between", [" {", "{", " { // %bb.0", "\n{", " {.reg .b32 %unused;"])
def test_the_brace_may_stand_on_the_line_of_the_entry(between):
    head = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry one(.param .u64 one_0) "
    program = parse(
        f"{head}.reqntid 64{between}\n.reg .b64 %w<2>;\nld.param.b64 %w1, [one_0];\nret;\n}}"
    )
    assert (program.name, program.threads) == ("one", 64)
    assert [each.opcode for each in program.instructions] == ["ld.param.b64", "ret"]


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ("(.param .b32 func_retval0) vprintf (.param .b64 a)", "tl.device_print"),
        ("__assertfail (.param .b64 a)", "tl.device_assert"),
        ("somebody (.param .b64 a)", "a function call"),
    ],
)
def test_functions_of_the_run_time_are_refused_by_what_they_are_in_triton(declared, what):
    with pytest.raises(PtxSyntaxError) as caught:
        parse(f".version 8.0\n.target sm_80\n.extern .func {declared};\n")
    assert caught.value.received.startswith(f"{what}: PTX line 3")
