"""Certify every example of this folder, and print the table of README.md.

python examples/certify/verdicts.py            # prints the table; takes minutes
python examples/certify/verdicts.py --write    # and puts it into README.md
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import isobit
from isobit.certifying.report.words import count_configurations, find_causes, listed, name_cause

HERE = Path(__file__).parent
TARGETS = ("sm_80", "sm_90", "sm_100")
EDGES = (1, 3, 70, 130)  # rows around the edges of the tiles of matmul.py
MARKS = "<!-- verdicts -->", "<!-- /verdicts -->"


@dataclass(frozen=True)
class Example:
    """A function of this folder, what varies, and what must come out."""

    function: str
    exit_code: int
    rows: tuple[int, ...] | None = (1, 3, 20)
    vary: tuple[tuple[str, tuple[int, ...]], ...] = ()
    few_rows: tuple[int, ...] | None = (1, 3)  # for a quick run that has the same verdict
    why: str = ""

    @property
    def command(self):
        """The command line, from the root of the repository."""
        words = ["isobit certify", f"examples/certify/{self.function}"]
        if self.rows is not None:
            words.append(f"--rows {','.join(map(str, self.rows))}")
        words += [f"--vary {name}={','.join(map(str, values))}" for name, values in self.vary]
        return " ".join(words)


WARPS = ("num_warps", (1, 2, 4, 8))
EXAMPLES = (
    Example(
        "matmul.py:matmul",
        0,
        EDGES,
        vary=(("BLOCK_M", (16, 64, 128)),),
        why="one accumulator runs through K, whatever the tile",
    ),
    Example(
        "matmul.py:autotuned", 0, EDGES, why="so the autotuner may pick any tile, also by rows"
    ),
    Example(
        "matmul.py:split_k_by_rows",
        1,
        EDGES,
        few_rows=(3, 20),
        why="the number of splits follows the number of rows",
    ),
    Example(
        "matmul.py:split_k_by_features",
        0,
        EDGES,
        vary=(("BLOCK_M", (16, 64)),),
        why="it follows K",
    ),
    Example("matmul.py:matmul_atomic", 1, EDGES, why="the order is whichever program comes first"),
    Example("softmax.py:softmax", 0, why="warps do not depend on the rows"),
    Example("softmax.py:warps_by_rows", 1, few_rows=(3, 9), why="`tl.sum` follows the warps"),
    Example("softmax.py:softmax_tree", 0, vary=(WARPS,), why="sums by `+` of neighbours"),
    Example("layer_norm.py:layer_norm", 0, why="warps follow the length of a row"),
    Example("layer_norm.py:autotuned", 1, why="`tl.sum` follows the warps that were picked"),
    Example("rms_norm.py:rms_norm", 0, why="one row per program"),
    Example("rms_norm.py:tile_by_rows", 1, few_rows=(3, 17), why="`tl.sum` follows the tile"),
    Example("flash_attention.py:prefill", 0, rows=(1, 3), why="a tile serves one sequence only"),
    Example(
        "flash_attention.py:split_by_batch",
        1,
        why="the number of splits follows the batch",
    ),
    Example("flash_attention.py:split_by_length", 0, why="it follows the keys"),
    Example("cross_entropy.py:cross_entropy", 0, why="one program per row"),
    Example(
        "cross_entropy.py:mean_by_atomics",
        1,
        rows=None,
        few_rows=None,
        why="the order is whichever program comes first",
    ),
)


def load(name):
    """Return a function of a file of this folder."""
    file, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, HERE / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def certify(example, quick=False):
    """Certify an example: all of it, or one target and few rows."""
    return isobit.certify(
        load(example.function),
        rows=example.few_rows if quick else example.rows,
        vary=dict(example.vary),
        targets=("sm_90",) if quick else TARGETS,
    )


def judge(found):
    """Return the verdict of a certificate in a few words."""
    if found.kept:
        return "one expression"
    if any(target.broken for target in found.targets):
        return "broken: " + next(t.broken[0].reason for t in found.targets if t.broken)
    if any(target.refused for target in found.targets):
        return "no verdict: " + next(t.refused[0].reason for t in found.targets if t.refused)
    causes = dict.fromkeys(name for target in found.targets for name in find_causes(target))
    numbers = sorted({len(target.classes) for target in found.targets})
    count = "–".join(str(number) for number in (numbers[0], numbers[-1])[: len(numbers)])
    words = [name_cause(name) for name in causes]
    return f"{count} expressions: depends on {listed(words) or 'the row'}"


def first_cell(example):
    """Return the start of an example's row."""
    return f"| `{example.command.removeprefix('isobit certify examples/certify/')}`"


def row(example):
    """Return one row of the table."""
    found = certify(example)
    cells = (
        first_cell(example).removeprefix("| "),
        count_configurations(found),
        judge(found),
        str(found.exit_code),
        example.why,
    )
    assert found.exit_code == example.exit_code, (example.function, str(found))
    return f"| {' | '.join(cells)} |", found


def known_rows():
    """Return the rows of the table in README.md, by their first cell."""
    table = (HERE / "README.md").read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    return {line.split(" | ")[0]: line for line in table.splitlines() if line.startswith("| `")}


def write_table(rows):
    """Put rows into the table of README.md, in the order of EXAMPLES; others stay as they are."""
    rows = {**known_rows(), **{line.split(" | ")[0]: line for line in rows}}
    lines = [rows[first_cell(one)] for one in EXAMPLES if first_cell(one) in rows]
    head = ["| `isobit certify` | compared | verdict | exit code | why |", "| --- " * 5 + "|"]
    before, _, rest = (HERE / "README.md").read_text().partition(MARKS[0])
    text = "\n".join([MARKS[0], *head, *lines, MARKS[1]])
    (HERE / "README.md").write_text(before + text + rest.partition(MARKS[1])[2])


def main():
    """Print a row per example; with --write, put them into the table."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    for example in EXAMPLES:
        if words and not any(word in example.function for word in words):
            continue
        line, found = row(example)
        print(line, flush=True)
        print(f"{found.seconds:.1f} s, {found.names:,} names", file=sys.stderr)
        if "--write" in sys.argv:
            write_table([line])


if __name__ == "__main__":
    main()
