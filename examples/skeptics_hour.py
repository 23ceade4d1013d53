"""Try to catch isobit out: each claim of the README is run here, beside a control that has to fail.

    python examples/skeptics_hour.py                       about ten minutes on two cores
    python examples/skeptics_hour.py --vllm PYTHON         with vLLM, of an environment as ./setup_vllm makes it
    python examples/skeptics_hour.py --long                with every contract anew: ten minutes more

Needs isobit with the extras transformers and proofs, and triton. Every part prints what it claims, the commands, and
whether both the claim and its control came out as they should. A part that cannot run counts as failed.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ISOBIT = (sys.executable, "-m", "isobit")
CONSOLE = Console(width=110, highlight=False)

# A linear layer that pads a batch to a multiple of 16 rows and adds two halves of a row in an order that the batch
# decides: accurate, and wrong for us.
WRONG = """
import torch


def linear(x, weight, bias=None):
    half = x.shape[-1] // 2
    low, high = x[..., :half] @ weight[:, :half].mT, x[..., half:] @ weight[:, half:].mT
    whole = x @ weight.mT
    whole = whole if x.shape[0] % 2 else low + high
    return whole if bias is None else whole + bias
"""


class Failed(Exception):
    """A claim or a control that came out otherwise."""


def run(*words, expected=0, cwd=None):
    """Run a command and print it; raise Failed if its exit code is another one."""
    shown = " ".join(str(w) for w in words).replace(f"{sys.executable} -m isobit", "isobit")
    CONSOLE.print(f"  $ {shown.replace(sys.executable, 'python')}", style="dim", markup=False)
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, cwd=cwd)
    if done.returncode != expected:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise Failed(f"exit code {done.returncode}, expected {expected}: {last}")
    return done.stdout


def expect(is_so, otherwise):
    """Raise Failed unless something is so."""
    if not is_so:
        raise Failed(otherwise)


def same_row(options, folder):
    """A row has the same bits alone and in a batch; stock's has not."""
    printed = run(sys.executable, HERE / "same_row.py")
    stock, ours = printed.splitlines()
    expect(ours.endswith("0 of 1024 elements differ"), printed)
    expect("elements differ, first" in stock, f"the control did not fail: {printed}")
    return f"isobit 0 of 1024 differ; stock {stock.split(maxsplit=1)[1].split(',')[0]}"


def doctor(options, folder):
    """The loaded kernels add in the defined order, by probing them."""
    found = json.loads(run(*ISOBIT, "doctor", "--json"))
    dtypes = [one["dtype"] for one in found["attestations"]]
    expect(found["executor"] == "native" and len(dtypes) == 3, str(found)[:300])
    return f"native kernels attested for {', '.join(dtypes)}"


def model(options, folder):
    """A whole model has one result in every layout of a batch: log-probabilities, gradients, weights."""
    words = (*ISOBIT, "gate", "model", "--model", "qwen3-tiny", "--dtype", "bf16", "--json", "-q")
    found = json.loads(run(*words))
    ours, stock = (
        [sum(row[key] for row in found[side]["rows"]) for key in ("differ", "numbers")]
        for side in ("isobit", "stock")
    )
    expect(ours[0] == 0 and ours[1] > 0, f"isobit: {ours}")
    expect(stock[0] > 0, f"the control did not fail: {stock}")
    return "isobit {:,} of {:,} differ; stock {:,} of {:,}".format(*ours, *stock)


def training(options, folder):
    """A training run has one curve on any ranks and micro-batches."""
    layouts = ("1x1x1", "1x4x1", "2x2x1", "4x1x1", "1x1x2", "ddp:2x2x1", "fsdp2:2x2x1")
    words = ("gate", "training", "--workload", "tiny", "--dtype", "fp32", "bf16", "--stock")
    found = json.loads(run(*ISOBIT, *words, "--json", "-q", "--layouts", *layouts))
    ours = [one for one in found["verdicts"] if one["side"] != "stock"]
    stock = [one for one in found["verdicts"] if one["side"] == "stock"]
    expect(ours and all(one["weights"] == 1 for one in ours), str(found["verdicts"]))
    expect(any(one["weights"] > 1 for one in stock), f"the control did not fail: {stock}")
    return "; ".join(
        f"{side} {one['dtype']}: {one['weights']} digests of {one['layouts']} layouts"
        for side, them in (("isobit", ours), ("stock", stock))
        for one in them
    )


def processes(options, folder):
    """The same on real processes over gloo."""
    words = ("gate", "training", "--workload", "tiny", "--transport", "gloo", "--json", "-q")
    found = json.loads(run(*ISOBIT, *words, "--layouts", "1x1x1", "2x2x1", "ddp:2x1x1"))
    (verdict,) = found["verdicts"]
    expect(verdict["weights"] == 1 and verdict["layouts"] == 3, str(verdict))
    return f"{verdict['weights']} digest of {verdict['layouts']} layouts"


def sabotage(options, folder):
    """The contract of linear is kept here, and catches every kernel that was planted in it."""
    words = (
        "verify",
        "matmul-kernel-v1",
        "--again",
        "--level",
        "L2",
        "--evidence",
        folder / "evidence",
    )
    found = json.loads(run(*ISOBIT, *words, "--json", "-q"))
    claims = [claim for one in found["contracts"] for claim in one["claims"]]
    planted = [one for claim in claims for one in claim["planted"]]
    caught = sum(one["caught"] for one in planted)
    expect(planted and caught == len(planted), f"{caught} of {len(planted)} caught")
    return f"{len(claims)} claims; {caught} of {len(planted)} planted faults caught"


def own_sabotage(options, folder):
    """A kernel that this script writes is accurate, and is rejected because it depends on the batch."""
    (folder / "wrong.py").write_text(WRONG)
    printed = run(*ISOBIT, "check", "wrong.py:linear", "--like", "linear", expected=1, cwd=folder)
    expect("broken" in printed, printed[-300:])
    return "rejected, exit code 1"


def rollout(options, folder):
    """In GRPO the KL between rollout and trainer is exactly 0; with stock it is not."""
    picture = folder / "zero_kl.svg"
    printed = run(sys.executable, HERE / "zero_kl.py", "--steps", "8", "--picture", picture)
    found = dict(re.findall(r"^(\w+) +KL exactly 0 at (\d+ of \d+) steps", printed, re.MULTILINE))
    expect(found.get("isobit") == "8 of 8", printed)
    expect(found.get("stock") == "0 of 8", f"the control did not fail: {printed}")
    return f"steps with a KL of exactly 0: isobit {found['isobit']}, stock {found['stock']}"


def certificate(options, folder):
    """A split-K kernel whose rows depend on the batch gets no certificate; a norm gets one."""
    kernels = HERE / "certify"
    words = (*ISOBIT, "certify", "-q", "--rows", "1,3,70,130")
    broken = run(*words, f"{kernels / 'matmul.py'}:split_k_by_rows", expected=1)
    expect("depends on the number of rows" in " ".join(broken.split()), broken[-300:])
    kept = run(*words, f"{kernels / 'softmax.py'}:softmax", expected=0)
    expect(
        "one expression" in " ".join(kept.split()).lower() or "same expression" in kept, kept[-300:]
    )
    return "split-K rejected; softmax has one expression in every configuration"


def deadlock(options, folder):
    """The simulator names a planted deadlock of 64 ranks."""
    script = HERE / "bugs" / "logging_deadlock.py"
    printed = " ".join(run(*ISOBIT, "simulate", script, "--ranks", "64", expected=1).split())
    expect("deadlock" in printed, printed[-300:])
    return "named, exit code 1"


def vllm(options, folder):
    """vLLM and the trainer have a KL of exactly 0 in every step; with stock they have not."""
    script = HERE / "grpo_vllm.py"
    words = ("--steps", "4", "--vllm-python", options.vllm, "--picture", folder / "grpo.svg")
    printed = run(sys.executable, script, *words)
    (row,) = (line for line in printed.splitlines() if "log-probabilities that differ" in line)
    stock, ours = re.findall(r"([\d,]+ of [\d,]+)", row)
    expect(ours.startswith("0 of") and not ours.startswith("0 of 0"), row)
    expect(not stock.startswith("0 of"), f"the control did not fail: {row}")
    return f"isobit {ours} log-probabilities differ; stock {stock}"


def contracts(options, folder):
    """Every contract of isobit, judged anew on this machine."""
    words = ("verify", "isobit", "--again", "--jobs", "2", "--evidence", folder / "all", "-q")
    return run(*ISOBIT, *words).strip().splitlines()[-1]


PARTS = (
    *(same_row, doctor, model, training, processes, sabotage, own_sabotage, rollout, certificate),
    deadlock,
)


def circumstances():
    """Return what was run, when, and how busy the machine was: a slow part may be a busy machine."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("isobit", "torch")
    )
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "minutes")
    return f"{versions}, {date}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--long", action="store_true", help="judge every contract anew")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="some parts")
    options = parser.parse_args()
    parts = [*PARTS, *[vllm] * bool(options.vllm), *[contracts] * options.long]
    if options.only:
        parts = [part for part in (*PARTS, vllm, contracts) if part.__name__ in options.only]
    table = Table("part", "as claimed", "seconds", "found")
    failed = 0
    CONSOLE.print(circumstances())
    with tempfile.TemporaryDirectory() as name:
        for at, part in enumerate(parts):
            CONSOLE.print(f"\\[{at + 1}/{len(parts)}] {part.__doc__}")
            start = time.monotonic()
            try:
                verdict, found = "yes", part(options, Path(name))
            except (Failed, OSError, ValueError, KeyError) as error:
                verdict, found = "NO", str(error)
                failed += 1
            seconds = f"{time.monotonic() - start:.0f}"
            CONSOLE.print(f"  {verdict}, {seconds} s: {found}", markup=False)
            table.add_row(part.__name__, verdict, seconds, found)
    CONSOLE.print(table)
    CONSOLE.print(f"{len(parts) - failed} of {len(parts)} parts as claimed")
    if not options.vllm and not options.only:
        CONSOLE.print("not run: vLLM (--vllm PYTHON)")
    return 1 if failed or not parts else 0


if __name__ == "__main__":
    sys.exit(main())
