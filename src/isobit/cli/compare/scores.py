"""`isobit compare scores`: is one model better than another, by a paired test over the same items?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.foundation.plain_text import one_line

PASSES = {
    "better": ("better",),
    "not-worse": ("better", "no difference shown"),
    "equal": ("no difference shown",),
}


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "scores",
        description="Compare two models on the same items of an evaluation (FALSIFY-ALBOR-005). Files are the samples "
        "that lm_eval --log_samples writes: JSONL with doc_id and a score per item. The test is exact: at most the "
        "share --level of comparisons of equal models is called different. "
        "Exit 0: what --expect says; 1: not; 2: could not read, or the items differ.",
        epilog="example: isobit compare scores base/samples_arc.jsonl distilled/samples_arc.jsonl --expect better",
    )
    parser.add_argument("base", type=Path, help="samples of the first model")
    parser.add_argument("new", type=Path, help="samples of the model that may be better")
    parser.add_argument("--metric", default="", help="the score (default: acc_norm, acc, …)")
    parser.add_argument("--level", type=float, default=0.05, help="(default: %(default)s)")
    parser.add_argument(
        "--expect", choices=tuple(PASSES), default="not-worse", help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def run(options: argparse.Namespace) -> int:
    """Compare and print. The exit code is 0 if what was expected was found, 1 if not, 2 if nothing was compared."""
    from isobit.comparing.scores import compare_scores

    found = compare_scores(options.base, options.new, metric=options.metric, level=options.level)
    if options.json:
        say_json(
            {
                "provenance": provenance_of(options, [str(options.base), str(options.new)]),
                "verdict": found.verdict,
                **asdict(found),
            }
        )
    else:
        make_console(140, soft_wrap=True).print(one_line(found.sentence))
    if found.verdict == "could not compare":
        return 2
    return 0 if found.verdict in PASSES[options.expect] else 1
