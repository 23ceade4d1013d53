"""Planted wrong kernels, each with what caught it; a control that is not caught fails."""

import re
from dataclasses import replace

import torch

from isobit.certifying.running.refusals import DataBranchError, RaceError
from tests.certifying import wrong_kernels
from tests.certifying.cases import judge, linear_case, rms_norm_case
from tests.certifying.running import Launch, Session, draw, raw

WARPS = (1, 2, 4, 8)


def shown(found):
    return (
        found.names_differ > 0,
        f"names differ {found.names_differ} of {found.names}, bits {found.bits_differ}",
    )


def split_by_rows():
    """K cut in 4 for few rows, and as the plan says for many."""
    few = judge(linear_case("bf16", 3, 16, 512, form="segments", segments=4), "sm_80")
    many = judge(linear_case("bf16", 16, 16, 512, form="segments"), "sm_80")
    caught, text = shown(few)
    return caught and many.right, f"3 rows: {text}; 16 rows: {shown(many)[1]}"


def other_segments():
    return shown(judge(linear_case("bf16", 16, 16, 512, segments=1), "sm_80"))


def swapped_steps():
    """Two tensor-core steps of one chain change places in the PTX text."""

    def swap(kernel, text):
        lines = text.splitlines()
        steps = [i for i, line in enumerate(lines) if "mma.sync" in line]
        chains = {}
        for i in steps:
            chains.setdefault(re.search(r"\{([^}]*)\}", lines[i])[1], []).append(i)
        # an mma of a chain writes the accumulator that a later one reads
        first = steps[0]
        written = re.search(r"\{\s*(%\w+)", lines[first])[1]
        second = next(i for i in steps[1:] if written in lines[i].rsplit("{", 1)[1])
        a, b = (re.split(r"(\{[^}]*\})", lines[i]) for i in (first, second))
        a[3], a[5], b[3], b[5] = b[3], b[5], a[3], a[5]  # the factors change places, not the sums
        lines[first], lines[second] = "".join(a), "".join(b)
        return "\n".join(lines)

    return shown(judge(linear_case("bf16", 16, 16, 512), "sm_80", mutate=swap))


def changed_merge():
    """One operand of one addition of two segments is another register."""

    def change(kernel, text):
        adds = re.findall(r"add\.rn\.f32\s+(%\w+), (%\w+), (%\w+);", text)
        old = next(re.finditer(r"add\.rn\.f32\s+%\w+, %\w+, %\w+;", text))[0]
        return text.replace(old, old.replace(adds[0][2] + ";", adds[1][2] + ";"), 1)

    return shown(judge(linear_case("bf16", 16, 16, 512), "sm_80", mutate=change))


def fused():
    """The compiler may fuse products and sums."""
    case = rms_norm_case("f32", 4, 512)
    (launch,) = case.launches
    options = {**launch.options, "enable_fp_fusion": True}
    return shown(judge(replace(case, launches=(replace(launch, options=options),)), "sm_90"))


def sums_by_warps():
    """tl.sum of 1024 numbers at four numbers of warps."""
    x, found, values = draw(1024, dtype="f32", seed=3), {}, set()
    for warps in WARPS:
        y = torch.zeros(1)
        session = Session("sm_90")
        launch = Launch(
            wrong_kernels.row_sum, (1,), {"x": x, "y": y, "N": 1024}, {"num_warps": warps}
        )
        session.run(launch)
        found[warps] = int(session.names_of(y)[0])
        values.add(raw(y).tobytes())
    orders = len(set(found.values()))
    return (
        orders > 1,
        f"{orders} orders at {len(WARPS)} warp counts; {len(values)} different values",
    )


def missing_barrier():
    """The barrier after a copy to shared memory is taken out."""

    def remove(kernel, text):
        at = text.index("bar.sync", text.index("cp.async.wait_group"))
        return text[:at] + "//" + text[at:]

    return refused(RaceError, linear_case("bf16", 16, 16, 512, (16, 16, 64)), mutate=remove)


def data_branch():
    x = draw(64, dtype="f32", seed=5)
    launch = Launch(wrong_kernels.branch_on_data, (1,), {"x": x, "y": torch.zeros(64), "N": 64}, {})
    return refused(DataBranchError, replace(linear_case("f32", 16, 16, 16), launches=(launch,)))


def refused(kind, case, **options):
    try:
        judge(case, "sm_80", **options)
    except kind as error:
        return True, f"refused: {type(error).__name__} at PTX line {error.ptx_line}"
    return False, "ran"


def wrong_leaf():
    found = judge(linear_case("bf16", 16, 16, 512), "sm_80", engine="tc25x16")
    return found.bits_differ > 0 and found.names_differ > 0, shown(found)[1]


def added_dot():
    """x + tl.dot(a, b), which Triton turns into tl.dot(a, b, x)."""
    case = linear_case("bf16", 16, 16, 512, (16, 16, 256))
    (launch,) = case.launches
    return shown(
        judge(replace(case, launches=(replace(launch, kernel=wrong_kernels.added_dot),)), "sm_80")
    )


CONTROLS = {
    "split K by rows": split_by_rows,
    "other segment length": other_segments,
    "two mma of a chain swapped in PTX": swapped_steps,
    "an operand of a merge changed in PTX": changed_merge,
    "fp fusion on": fused,
    "tl.sum at 1, 2, 4, 8 warps": sums_by_warps,
    "a barrier missing in PTX": missing_barrier,
    "a branch that depends on data": data_branch,
    "the wrong leaf": wrong_leaf,
    "a dot added to a tile": added_dot,
}
