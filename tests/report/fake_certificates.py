"""Certificates made by hand, for the tests of reports: every verdict, and names that try to be markup."""

from itertools import product

from isobit.certifying.records import (
    BROKEN,
    REFUSED,
    Certified,
    Configuration,
    ExpressionClass,
    KernelFacts,
    Outcome,
    Parting,
    Share,
    Step,
    TargetReport,
    TensorRead,
)
from isobit.foundation.records import Provenance
from isobit.order.addition import chain

ORIGIN = Provenance(
    isobit="0.1.0",
    torch="2.13.0",
    python="3.11.4",
    cpu="a processor",
    engine="amx; avx512",
    command="isobit certify matmul.py:matmul --html certificate.html",
    date="2026-11-16T00:00:00+00:00",
    digest="0123456789abcdef0123456789abcdef",
)
TARGETS = {"sm_80": "tc24x8", "sm_90": "tc25x16", "sm_100": "tc25x16"}
ROWS = (1, 3, 70, 130)


def fused_chain(start, stop, group=16):
    """The order of a tensor core: so many products and the sum so far in one addition."""
    branch = tuple(range(start, start + group))
    for first in range(start + group, stop, group):
        branch = (branch, *range(first, first + group))
    return branch


def split(parts, terms=256):
    size = terms // parts
    return chain([fused_chain(at * size, (at + 1) * size) for at in range(parts)])


def facts(kernel="matmul_kernel", target="sm_90", block=64, **changed):
    known = {
        "options": f"BLOCK_M={block} BLOCK_N=64 BLOCK_K=32 num_warps=4 num_stages=3",
        "digest": f"{block:02x}" * 16,
        "engine": TARGETS.get(target, ""),
        "tensor_core": {"wgmma.mma_async.m64n64k16": 4},
        "registers": 102,
        "spill_bytes": 0,
        "shared_bytes": 24576,
        "fused": 0,
        "lines": 512,
    }
    return KernelFacts(kernel, target, **{**known, **changed})


def parting(classes, at):
    """The place where the first and another class differ."""
    left = Step(
        "add.rn.f32",
        "(x[k=0…63]·w) + (x[k=64…127]·w)",
        88,
        "add.rn.f32 \t%r31, %r29, %r30;",
        ("matmul.py", 71),
        "total += tl.load(partials + split * size + at, mask=at < size)",
    )
    right = Step(
        "mma.sync",
        "(x[k=0…63]·w) + x[k=64]·w + … + x[k=79]·w",
        412,
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, …;",
        ("matmul.py", 35),
        "acc = tl.dot(a, b, acc)",
    )
    return Parting(
        0,
        at,
        classes[0].configurations[0],
        classes[at].configurations[0],
        output="output 0, element [0]",
        left_step=left,
        right_step=right,
        equal_below=4,
        detail="One side adds two finished sums, the other adds 16 more products to the first sum.",
    )


def target_of(name, class_of, rows=ROWS, settings=(), trees=(), partings=True, verdict=None):
    """A report of one target: `class_of(rows, settings)` numbers the expression of a configuration."""
    configurations = [
        Configuration(name, count, tuple(zip([k for k, _ in settings], values, strict=True)))
        for values in product(*(v for _, v in settings))
        for count in rows
    ]
    outcomes, members = [], {}
    for one in configurations:
        failed = verdict(one) if verdict else None
        if failed:
            outcomes.append(
                Outcome(one, *failed[:1], reason=failed[1], remedy=failed[2], where=failed[3])
            )
            continue
        at = class_of(one.rows, dict(one.settings))
        members.setdefault(at, []).append((one, one.rows, one.rows))
        digest = f"{at + 10:02x}" * 16
        outcomes.append(
            Outcome(
                one,
                expressions=(Share(digest, one.rows, 0),),
                names=one.rows * 64,
                bits_equal=one.rows,
                bits_rows=one.rows,
                launches=1,
                kernels=(0,),
                executed=12_345,
                seconds=0.5,
            )
        )
    classes = tuple(
        ExpressionClass(
            f"{at + 10:02x}" * 16, tuple(found), trees[at] if at < len(trees) else None, "(…) + (…)"
        )
        for at, found in members.items()
    )
    parted = tuple(parting(classes, at) for at in range(1, len(classes)))
    kernels = (facts(target=name), facts("merge_kernel", name, 256, tensor_core={}, engine=""))
    return TargetReport(
        name, TARGETS[name], tuple(outcomes), classes, parted if partings else (), kernels
    )


READ = (
    TensorRead("input", "input 0 (x of matmul_kernel)", "rows × 256", 0, 1, "bfloat16"),
    TensorRead("input", "input 1 (w of matmul_kernel)", "[256, 64]", None, 1, "bfloat16"),
    TensorRead("output", "output 0", "rows × 64", 0, 1, "bfloat16"),
)


def certified(targets, function="matmul.py:matmul", vary=(), groups=(), rows=ROWS, **more):
    return Certified(
        function,
        tuple(targets),
        rows,
        vary,
        READ,
        groups,
        triton="3.7.1",
        seconds=21.5,
        provenance=more.pop("provenance", ORIGIN),
        **more,
    )


def kept():
    vary = (("BLOCK_M", ("16", "64", "128")),)
    made = [target_of(t, lambda rows, s: 0, settings=vary, trees=(split(1),)) for t in TARGETS]
    return certified(made, vary=vary, groups=(("sm_80",), ("sm_90", "sm_100")))


def by_rows(rows, settings):
    return 0 if rows <= 16 else 1 if rows <= 100 else 2


def split_by_rows():
    made = [target_of(t, by_rows, trees=(split(4), split(2), split(1))) for t in TARGETS]
    return certified(made, "matmul.py:split_k_by_rows")


def by_block():
    vary = (("BLOCK_M", ("16", "64")), ("num_warps", ("4", "8")))
    made = [
        target_of("sm_90", lambda rows, s: int(s["num_warps"] == "8"), settings=vary, rows=(1, 3))
    ]
    return certified(made, vary=vary, rows=(1, 3))


def atomics():
    reason = (
        BROKEN,
        "float additions by atomics: their order is not fixed",
        "write partial sums to a buffer, and add them in a second kernel",
        "matmul.py:107, PTX line 300",
    )
    made = [target_of(t, lambda rows, s: 0, verdict=lambda one: reason) for t in TARGETS]
    return certified(made, "matmul.py:matmul_atomic")


def refused():
    reason = (REFUSED, "no rule for `lop3.b32`", "report the instruction", "PTX line 12")
    made = [
        target_of("sm_90", lambda rows, s: 0, verdict=lambda one: reason if one.rows > 3 else None)
    ]
    return certified(made)


def rows_differ():
    """Rows of one call that have two expressions."""
    one = Configuration("sm_90", 70)
    shares = (Share("0a" * 16, 64, 0), Share("0b" * 16, 6, 64))
    outcome = Outcome(one, expressions=shares, names=4480)
    classes = (
        ExpressionClass("0a" * 16, ((one, 64, 70),)),
        ExpressionClass("0b" * 16, ((one, 6, 70),)),
    )
    made = TargetReport("sm_90", "tc25x16", (outcome,), classes, (Parting(0, 1, one, one),))
    return certified([made], rows=(70,))


def empty():
    return certified([], provenance=None)


CASES = {
    "kept": kept,
    "split by rows": split_by_rows,
    "by block": by_block,
    "atomics": atomics,
    "refused": refused,
    "rows differ": rows_differ,
    "empty": empty,
}
