"""`python -m benchmarks pages`: write the records of runs into the pages, between their markers.

A page has `<!-- record: NAME -->` and `<!-- /record -->`; what is between them is written here;
`NAME summary` shows only the record's last table, and `NAME data` a link to the record instead of
its tables. README.md has `<!-- cost -->`, a table of ratios to stock that is computed from the same records.
"""

import json
import re
import sys
import textwrap

from benchmarks.records import RECORDS, ROOT, SHORT

RESULTS = ROOT / "docs" / "results"
MARK = re.compile(r"(<!-- record: ([\w-]+)( summary| data)? -->\n).*?(<!-- /record -->)", re.DOTALL)
COST = re.compile(r"(<!-- cost -->\n).*?(<!-- /cost -->)", re.DOTALL)


def main(words: list[str]) -> int:
    """Write every page; with `--check`, only report which pages are out of date."""
    stale = []
    for path in [ROOT / "README.md", *sorted(RESULTS.glob("*.md"))]:
        text = path.read_text()
        if text != render(text):
            stale.append(path.name)
            if "--check" not in words:
                path.write_text(render(text))
    sys.stdout.write("\n".join(stale) + "\n" if stale else "all pages show their records\n")
    return int(bool(stale) and "--check" in words)


def render(text: str) -> str:
    """Return a page with the text between its markers replaced."""
    text = MARK.sub(
        lambda found: found[1] + show(found[2], (found[3] or "").strip()) + found[4], text
    )
    return COST.sub(lambda found: found[1] + show_cost() + found[2], text)


def load(name: str) -> dict:
    return json.loads((RECORDS / f"{name}.json").read_text())


def show(name: str, mode: str = "") -> str:
    """Return a record as Markdown: the command and where it ran, its tables, then its lines.

    Mode "summary" shows the last table only; "data" shows a link and the last line.
    """
    record = load(name)
    blocks = [f"```bash\n{record['command']}\n```", provenance(record)]
    tables, lines = record["tables"], record["lines"]
    if mode == "data":
        rows = " and ".join(str(len(table["rows"])) for table in tables)
        blocks.append(f"All {rows} rows: [{name}.json](records/{name}.json).")
        lines = lines[-1:]
    else:
        shown = tables[-1:] if mode == "summary" else tables
        blocks += [as_table(table["header"], table["rows"]) for table in shown]
    if lines:
        blocks.append("\n".join(["```text", *lines, "```"]))
    return "\n".join(f"{block}\n" for block in blocks)


def provenance(record: dict) -> str:
    text = (
        f"Run on {record['date']} at commit {record['commit']}: {record['machine']}, torch"
        f" {record['torch']}, version {record.get('order', 1)} of the order."
    )
    if "minutes" in record:
        text += f" {record['minutes']} minutes."
    if "exit" in record:
        text += " Exit code 1: it says what is broken."
    return textwrap.fill(text, 98)


def as_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def show_cost() -> str:
    """Return what a user pays, as stock's time divided by isobit's, from four records; the weak cells too."""
    layers = "linear layers of Qwen3-0.6B"
    rows = [
        cost(f"{layers}: forward, 64 rows or more", "linear", "forward of 64", "not frozen"),
        cost(f"{layers}: forward, one row", "linear", "forward of one", "M=1"),
        cost(f"{layers}: forward and backward", "linear", "forward and", "fwd+bwd"),
        cost("Qwen3-0.6B: prefill of 512 tokens", "whole-model", "prefill"),
        cost("Qwen3-0.6B: decode, batch 8", "whole-model", "decode"),
        cost("Qwen3-0.6B: training step, 2 × 128 tokens", "whole-model", "training"),
        cost("log-probabilities over 151,936 tokens, with gradients", "logprob", "step"),
        cost("data-parallel step on two ranks, with AdamW", "step", "", "ours / stock"),
    ]
    return as_table(["stock time / isobit time", "fp32", "bf16"], rows) + "\n"


def cost(what: str, name: str, case: str, column: str = "ratio") -> list[str]:
    """Return a row of the table of costs, which says whether its machine had AMX."""
    amx = ", with AMX" if load(name)["machine"].endswith("with AMX") else ""
    return [f"{what}{amx}", *ratios(name, case, column)]


def ratios(name: str, case: str, column: str = "ratio") -> list[str]:
    """Return the fp32 and bf16 cells of a record's first rows of a case with two threads or ranks.

    Records of benchmarks that did not have quartiles yet have the ratio in another column, and no column of cases.
    """
    table = load(name)["tables"][-1]
    titles = table["header"]
    if "ratio" in titles:
        column = "ratio"
    place = next(i for i, title in enumerate(titles) if title.startswith(column))
    found: dict[str, str] = {}
    for row in table["rows"]:
        cells = dict(zip(titles, row, strict=True))
        if cells.get("threads", cells.get("ranks")) != "2":
            continue
        if cells.get("case", cells.get("what", case)).startswith(case):
            found.setdefault(SHORT[cells["dtype"]], row[place])
    return [show_ratio(found[dtype], column) for dtype in DTYPES]


def show_ratio(cell: str, column: str) -> str:
    """Return a ratio, or the words `about 1`, as stock's time divided by ours."""
    if not re.fullmatch(r"[\d.]+", cell):
        return cell
    return f"{1 / float(cell) if column.startswith('ours') else float(cell):.2f}"


DTYPES = ("fp32", "bf16")
