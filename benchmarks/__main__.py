"""`python -m benchmarks CASE` compares isobit with stock PyTorch in one run, alternating between the two.

`record NAME` stores a run in docs/results/records; `pages` writes the records into the documentation.
`follow` runs the blocks of the documentation with another Python, such as one with a fresh wheel.
`full_check` runs every test, in shards whose results are kept.
"""

import argparse
import sys
import traceback
from importlib import import_module

CASES = (
    "linear",
    "bounds",
    "rows",
    "adamw",
    "model",
    "structure",
    "logprob",
    "memory",
    "exchange",
    "levels",
    "step",
    "profiled_step",
    "agreement",
    "simulator",
    "bugs",
    "scripts",
    "training_bugs",
    "usual_scripts",
    "guards",
    "autopsy",
    "audit",
    "audit_whole",
    "certify",
    "certificates",
    "leaf",
    "kernels",
    "binaries",
    "roofline",
    "host_time",
    "machine_code",
    "comparisons",
    "candidates",
    "families",
    "blocks",
    "post_training",
    "recipes",
    "vllm",
    "vllm_whole",
    "vllm_lora",
)

if sys.argv[1:2] in (["record"], ["pages"], ["follow"], ["full_check"]):
    module = {"record": "records"}.get(sys.argv[1], sys.argv[1])
    sys.exit(import_module(f"benchmarks.{module}").main(sys.argv[2:]))

parser = argparse.ArgumentParser(
    prog="python -m benchmarks", description="Each against stock, in one run, by turns."
)
parser.add_argument("case", choices=CASES)
parser.add_argument("--quick", action="store_true", help="the 0.6B shapes only, fewer repetitions")
parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
parser.add_argument(
    "--dtypes",
    nargs="+",
    default=["float32", "bfloat16"],
    choices=["float32", "bfloat16", "float16"],
)
options = parser.parse_args()
case = import_module(f"benchmarks.{options.case}")
try:
    code = case.run(options.quick, options.threads, options.dtypes)
except SystemExit as ended:
    code = ended.code
except Exception:
    code = traceback.format_exc()
# Python would exit with 1 after a text, which says of a record that something is broken
if isinstance(code, str):
    print(code, file=sys.stderr)
    code = 2
sys.exit(code)
