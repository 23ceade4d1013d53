"""`python -m benchmarks linear`, `softmax`, `model`, `logprob` or `exchange`."""

import argparse
import sys

from benchmarks import exchange, linear, logprob, model, softmax

CASES = {"linear": linear, "softmax": softmax, "model": model, "logprob": logprob, "exchange": exchange}

parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Each against stock, in one run, by turns.")
parser.add_argument("case", choices=CASES)
parser.add_argument("--quick", action="store_true", help="the 0.6B shapes only, fewer repetitions")
parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
options = parser.parse_args()
sys.exit(CASES[options.case].run(options.quick, options.threads, options.dtypes))
