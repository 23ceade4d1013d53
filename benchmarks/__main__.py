"""`python -m benchmarks CASE`: each against stock, by turns, or against the time that was promised."""

import argparse
import sys
from importlib import import_module

CASES = (
    "linear",
    "softmax",
    "model",
    "structure",
    "logprob",
    "exchange",
    "step",
    "agreement",
    "simulator",
    "bugs",
)

parser = argparse.ArgumentParser(
    prog="python -m benchmarks", description="Each against stock, in one run, by turns."
)
parser.add_argument("case", choices=CASES)
parser.add_argument("--quick", action="store_true", help="the 0.6B shapes only, fewer repetitions")
parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
parser.add_argument(
    "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
)
options = parser.parse_args()
sys.exit(
    import_module(f"benchmarks.{options.case}").run(options.quick, options.threads, options.dtypes)
)
