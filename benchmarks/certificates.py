"""Certificates of kernels whose verdict is known: wrong ones must get none, right ones should.

Wrong kernels are those of tests/certifying, each at the row counts of its test. Right ones are the examples, the right
twins of the tests, and kernels of Liger and fla, unedited, if they are installed
(`pip install --no-deps liger-kernel==0.8.5 fla-core==0.6.0`); each is judged at the same row counts, and the table says
for how many rows its certificate is. Verdicts are kept in build/, by a digest of the sources that judge and of the
kernels, so that a run can be taken up again; with `--quick` only kept ones are shown.
"""

import hashlib
import importlib.util
import json
import time
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.records import ROOT
from tests.certifying import careless_subjects as careless
from tests.certifying.test_no_false_certificate import RIGHT, all_wrong

KEPT = ROOT / "build" / "certificates"
# One row, tiles that are not full, a multiple of 16, and several programs.
ROW_COUNTS = (1, 3, 16, 70)
UNUSUAL = ("in_place", "strided", "reversed_view", "heuristic", "lambda_grid", "returns_tuple",
           "two_views", "launches_in_thread", "exponential", "calls_cuda", "asks_the_card")  # fmt: skip


def right_kernels():
    """Yield (name, function of the number of rows) of kernels whose rows do not depend on the batch."""
    place = ROOT / "examples" / "certify" / "verdicts.py"
    spec = importlib.util.spec_from_file_location("verdicts", place)
    verdicts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verdicts)
    for example in verdicts.EXAMPLES:
        if example.exit_code == 0:
            yield f"examples: {example.function}", verdicts.load(example.function)
    for function, _ in RIGHT:
        yield f"right_kernels.py: {function.__name__}", function
    for name in UNUSUAL:
        yield f"careless_subjects.py: {name}", getattr(careless, name)
    for package, functions in (("liger_kernel", liger_kernels), ("fla", fla_kernels)):
        if importlib.util.find_spec(package):
            yield from functions()


def draw(rows, columns=1024):
    return torch.randn(rows, columns)


def liger_kernels():
    """Yield Liger's functions of rows, unedited, at 1,024 columns or, as norms of heads, at 128."""
    from liger_kernel.transformers import functional

    weight, bias = torch.randn(1024), torch.randn(1024)
    norm, heads = functional.liger_rms_norm, weight[:128].clone()
    yield "Liger: softmax", lambda rows: functional.liger_softmax(draw(rows))
    yield "Liger: swiglu", lambda rows: functional.liger_swiglu(draw(rows), draw(rows))
    yield "Liger: geglu", lambda rows: functional.liger_geglu(draw(rows), draw(rows))
    layer = functional.liger_layer_norm
    yield "Liger: layer_norm", lambda rows: layer(draw(rows), weight, bias, 1e-5)
    yield "Liger: rms_norm", lambda rows: norm(draw(rows), weight, 1e-6)
    yield "Liger: rms_norm of heads", lambda rows: norm(draw(rows, 128), heads, 1e-6)


def fla_kernels():
    """Yield functions of rows of flash-linear-attention, unedited."""
    from fla.modules import activations
    from fla.modules.l2norm import l2norm
    from fla.modules.layernorm import layer_norm, rms_norm

    weight, bias = torch.randn(1024), torch.randn(1024)
    yield "fla: rms_norm", lambda rows: rms_norm(draw(rows), weight, None)
    yield "fla: layer_norm", lambda rows: layer_norm(draw(rows), weight, bias)
    yield "fla: l2norm of heads", lambda rows: l2norm(draw(rows, 128))
    yield "fla: swiglu", lambda rows: activations.swiglu(draw(rows), draw(rows))
    yield "fla: swish", lambda rows: activations.swish(draw(rows))


def sources():
    """Return a digest of what judges and of what is judged."""
    found = hashlib.blake2b(digest_size=8)
    for folder in ("src/isobit/certifying", "tests/certifying", "examples/certify"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def judge(function, rows):
    """Return the verdict of one kernel on sm_90, and what it says, as a record."""
    begun = time.process_time()
    try:
        found = isobit.certify(function, rows=rows, targets=("sm_90",))
    except (isobit.errors.IsobitError, ImportError, AttributeError) as error:
        said = getattr(error, "received", "") or str(error)
        verdict = {"code": 2, "kept": False, "raised": True, "why": said}
    else:
        (target,) = found.targets
        left = [str(one) for one in (*found.unsettled, *found.unjudged)]
        left += [one.reason for one in (*target.broken, *target.refused)]
        verdict = {
            "code": found.exit_code,
            "kept": found.kept,
            "raised": False,
            "most": found.most_rows,
            "compared": f"{target.rows_compared or 0} of {target.rows}",
            "why": (target.rows_reason if found.kept else "") or (left[0] if left else ""),
            "classes": len(target.classes),
        }
    return verdict | {"seconds": time.process_time() - begun}


def kept_verdict(kind, name, function, rows, quick):
    """Return a verdict that was kept, or judge now; None if neither is so."""
    digest = hashlib.blake2b(f"{kind} {name} {rows} {sources()}".encode(), digest_size=10)
    path = KEPT / f"{digest.hexdigest()}.json"
    if not path.exists() and not quick:
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(judge(function, rows)))
    return json.loads(path.read_text()) if path.exists() else None


def show_wrong(console, quick):
    """Judge the wrong kernels; return how many have a certificate and how many were not judged."""
    outcomes, seconds, false, left = Counter(), {}, [], 0
    for one in all_wrong():
        function, rows = one.values
        found = kept_verdict("wrong", one.id, function, rows, quick)
        if found is None:
            left += 1
            continue
        how = "raised before it was judged" if found["raised"] else f"exit code {found['code']}"
        outcomes[how] += 1
        seconds.setdefault(how, []).append(found["seconds"])
        if found["kept"] or found["code"] == 0:
            false.append(one.id)
    table = Table("wrong kernels", "number", "seconds each, median", "longest")
    for how, number in sorted(outcomes.items()):
        spent = sorted(seconds[how])
        table.add_row(how, str(number), f"{spent[len(spent) // 2]:.1f}", f"{spent[-1]:.1f}")
    console.print(table)
    console.print(
        f"{len(false)} false certificates of {outcomes.total()} wrong kernels; {left} were not judged"
    )
    for name in false:
        console.print(f"false certificate: {name}")
    return len(false), outcomes.total()


def show_right(console, quick):
    """Judge right kernels, and print for how many rows each certificate is, and why not for all."""
    table = Table("right kernel", "rows compared", "verdict", "why", "seconds")
    kept = every = count = left = 0
    for name, function in right_kernels():
        found = kept_verdict("right", name, function, ROW_COUNTS, quick)
        if found is None:
            left += 1
            continue
        count, spent = count + 1, f"{found['seconds']:.1f}"
        verdict = "refused" if found["raised"] or found["code"] == 2 else "broken"
        if found["code"] == 1 and found.get("classes", 0) > 1:
            verdict = f"{found['classes']} expressions"
        if found["kept"]:
            kept, every = kept + 1, every + bool(found["most"])
            verdict = "one expression, row counts tried"
            if found["most"]:
                verdict = f"one expression, every row count up to {found['most']:,}"
        table.add_row(name, found.get("compared", "0"), verdict, found["why"], spent)
    console.print(table)
    console.print(
        f"{kept} of {count} right kernels are certified at {', '.join(map(str, ROW_COUNTS))} rows on sm_90,"
        f" {every} of them for every row count; {left} were not judged"
    )
    return kept


def run(quick, threads, dtypes):
    """Print both tables; return 1 if a wrong kernel has a certificate, or nothing was judged."""
    console = Console(highlight=False, width=280)
    false, judged = show_wrong(console, quick)
    kept = show_right(console, quick)
    return int(bool(false) or not judged or not kept)
