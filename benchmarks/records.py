"""Records of runs: `python -m benchmarks record NAME` runs a command and stores what it printed.

A record is a JSON file in docs/results/records: the command, commit, date and machine, the digest of its sources,
tables, the lines that were printed beside them, how long it took, and the exit code if it was 1. The sources of a
record are the kernels, the package's data, the modules of the package that its processes loaded (benchmarks/loading
notes them), the contracts of those modules, and those benchmarks, examples and tests that its command imports or
names. So a module or a benchmark that is mended makes only those records anew that it can have changed.
`python -m benchmarks pages` writes records into the pages. `record --all` makes every record that is not of these
sources: first those whose times are shown, one after the other, then the others, `--jobs` at a time. It can be
stopped, and goes on where it was. Hours.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO

from blake3 import blake3

from isobit.foundation.machine import fingerprint
from isobit.foundation.native import pairs_bf16
from isobit.order.plan import VERSION

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "results" / "records"
PACKAGE = ("src", "csrc", "setup.py", "constraints.txt")
SOURCES = (*PACKAGE, "benchmarks", "examples")
# These read what commands print and show it; a record has its command.
NOT_DECIDING = {f"benchmarks/{name}.py" for name in ("__init__", "__main__", "records", "pages")}
DIGESTS = ("curves", "weights", "gradients", "optimizers")
# They check what is installed and passed, and raise; they compute nothing.
NO_FIGURES = {f"src/isobit/integrations/transformers/{name}.py" for name in ("package", "refusals")}
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
NOT_SOURCES = ("src/isobit/library/evidence.json", "src/isobit/certifying/running/sass.json")
GATE = "isobit gate training --dtype fp32 bf16"
COMMANDS = {
    "one-run": f"{GATE} --workload small --stock --jobs 2 --keep build/one-run.jsonl --json",
    "one-run-experts": f"{GATE} --workload moe --stock --jobs 2 --keep build/experts.jsonl --json",
    "one-run-processes": f"{GATE} --workload small --transport gloo --keep build/gloo.jsonl --json"
    " --layouts 1x1x1 1x4x1 2x1x1 2x2x1 4x1x1 4x2x1 1x1x2 2x1x2 2x2x2 1x1x4 ddp:2x4x1 fsdp2:4x2x1",
    "one-run-whole": f"{GATE} --workload whole --keep build/whole.jsonl --json"
    " --layouts 1x1x1 1x4x1 1x8x1 2x1x1 2x2x1 4x2x1 1x1x2 2x1x2",
    "model": "isobit gate model --model qwen3-0.6b --dtype bfloat16 --json",
    "model-lora": "isobit gate model --model benchmarks/gate_models.py:mistral_lora --dtype bf16 --json",
    "model-experts": "isobit gate model --model benchmarks/gate_models.py:qwen3_moe --dtype bf16 --json",
    "contracts": "isobit verify isobit --evidence build/evidence --json",
    "linear": "python -m benchmarks linear --quick",
    "bounds": "python -m benchmarks bounds",
    "whole-model": "python -m benchmarks model --quick --threads 2",
    "logprob": "python -m benchmarks logprob --quick --threads 2",
    "memory": "python -m benchmarks memory",
    "rows": "python -m benchmarks rows --threads 1",
    "adamw": "python -m benchmarks adamw --quick --threads 1 --dtypes float32 bfloat16 float16",
    "exchange": "python -m benchmarks exchange",
    "levels": "python -m benchmarks levels",
    "step": "python -m benchmarks step --quick",
    "blocks": "python -m benchmarks blocks --quick",
    "profiled-step": "python -m benchmarks profiled_step --quick --dtypes float32",
    "usual-scripts": "python -m benchmarks usual_scripts",
    "agreement": "python -m benchmarks agreement",
    "bugs": "python -m benchmarks bugs",
    "scripts": "python -m benchmarks scripts",
    "training-bugs": "python -m benchmarks training_bugs",
    "guards": "python -m benchmarks guards",
    "autopsy": "python -m benchmarks autopsy",
    "simulator": "python -m benchmarks simulator --quick",
    "audit": "python -m benchmarks audit --quick --threads 2",
    "audit-whole": "python -m benchmarks audit_whole --threads 2",
    "certify": "python -m benchmarks certify",
    "certificates": "python -m benchmarks certificates",
    "leaf": "python -m benchmarks leaf",
    "kernels": "python -m benchmarks kernels",
    "binaries": "python -m benchmarks binaries --quick",
    "roofline": "python -m benchmarks roofline",
    "host-time": "python -m benchmarks host_time",
    "machine-code": "python -m benchmarks machine_code",
    "comparisons": "python -m benchmarks comparisons",
    "candidates": "python -m benchmarks candidates",
    "post-training": "python -m benchmarks post_training",
    "families": "python -m benchmarks families --threads 1",
    "vllm": "python -m benchmarks vllm",
    "vllm-whole": "python -m benchmarks vllm_whole",
    "vllm-lora": "python -m benchmarks vllm_lora",
    "vllm-speed": ".venv-vllm/bin/python -m benchmarks.vllm_speed",
    "vllm-grpo": "python examples/grpo_vllm.py --steps 40",
    "full-check": "python -m benchmarks full_check",
    "gpu-contracts": "isobit verify isobit --evidence build/evidence --backend interpreter"
    " --target sm_90 --json",
}
# Their tables show times or ratios of times, so nothing else runs meanwhile; shortest first, as `--all` makes them.
TIMED = (
    "host-time",
    "linear",
    "logprob",
    "rows",
    "bounds",
    "adamw",
    "exchange",
    "whole-model",
    "step",
    "blocks",
    "agreement",
    "guards",
    "levels",
    "simulator",
    "profiled-step",
    "audit",
    "audit-whole",
    "vllm-speed",
)


def main(words: list[str]) -> int:
    """Make one record or all, or list them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks record")
    parser.add_argument("name", nargs="*", choices=[*COMMANDS, []], metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every record that is of other sources")
    parser.add_argument(
        "--list", action="store_true", help="print which records are of these sources"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="records at a time, if no time is shown"
    )
    parser.add_argument("--output", type=Path, help="what the command printed, from an earlier run")
    parser.add_argument("--commit", default="HEAD", help="the commit of that run")
    options = parser.parse_args(words)
    if options.list:
        return list_records()
    names = options.name
    if options.all:
        names = [name for name in names or COMMANDS if not is_current(name)]
    elif len(names) != 1:
        parser.error("expected the name of one record, or --all")
    if modified_sources() and not options.output:
        parser.error(f"expected sources as committed; modified: {modified_sources()}")
    if options.all:
        return make_all(names, options.jobs)
    make(names[0], options.output, options.commit)
    return 0


def make_all(names: list[str], jobs: int = 1) -> int:
    """Make records; one that fails does not stop the others. Return 1 if one could not be made."""
    alone = [name for name in TIMED if name in names]
    others = [name for name in names if name not in TIMED]
    total = len(names)
    failed = [name for name in alone if not make_or_tell(name, total)]
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(partial(make_or_tell, total=total), others)
        failed += [name for name, is_made in zip(others, made, strict=True) if not is_made]
    print(f"{total - len(failed)} of {total} records made; failed: {failed or 'none'}")
    return int(bool(failed))


def make_or_tell(name: str, total: int) -> bool:
    """Make one record of `total`, and print how it went; return whether it was made."""
    start = time.monotonic()
    print(f"{name}, one of {total}: {COMMANDS[name]}", file=sys.stderr, flush=True)
    try:
        code = make(name)
        outcome = "recorded" if code == 0 else f"recorded, exit code {code}"
    except (subprocess.CalledProcessError, OSError, ValueError, KeyError, IndexError) as error:
        outcome, code = f"failed: {error}", None
    minutes = (time.monotonic() - start) / 60
    print(f"    {name}: {outcome} after {minutes:.1f} minutes", file=sys.stderr, flush=True)
    return code is not None


def list_records() -> int:
    """Print each record's commit, and whether its sources are those of this commit; return 1 if some are not."""
    others = [name for name in COMMANDS if not is_current(name)]
    for name in COMMANDS:
        path = RECORDS / f"{name}.json"
        record = json.loads(path.read_text()) if path.exists() else {"commit": "none"}
        print(f"{name:14} {record['commit']:9}", "other sources" if name in others else "current")
    print(f"{len(COMMANDS) - len(others)} of {len(COMMANDS)} records are of these sources")
    return int(bool(others))


def is_current(name: str) -> bool:
    """Return whether a record was made by today's command from the sources of this commit."""
    path = RECORDS / f"{name}.json"
    if not path.exists():
        return False
    record = json.loads(path.read_text())
    is_command = record["command"] == COMMANDS[name].replace(" --json", "")
    sources = sources_of(name, modules=loaded(record))
    return is_command and record.get("sources") == sources_digest("HEAD", sources)


def loaded(record: dict) -> list[str] | None:
    """Return the modules of the package that a recorded run loaded, if that was seen."""
    return record["modules"].split() if "modules" in record else None


def sources_digest(commit: str = "HEAD", paths: tuple[str, ...] = SOURCES) -> str:
    """Return the digest of files at a commit; evidence and results are made from them, so they are not in it."""
    lines = git("ls-tree", "-r", commit, "--", *paths).splitlines()
    return blake3("\n".join(x for x in lines if not x.endswith(NOT_SOURCES)).encode()).hexdigest()[
        :32
    ]


def sources_of(
    name: str, commit: str = "HEAD", modules: list[str] | None = None
) -> tuple[str, ...]:
    """Return the files and folders that decide a record: the package, and what its command imports or names.

    Of the package, those modules that were loaded, with its data; the whole of it if it was not seen what was
    loaded. Imports of modules of `benchmarks` and `tests` are followed, as text; a package is its whole folder. A
    command that runs tests is decided by all of them.
    """
    if name == "full-check":
        return (*SOURCES, "tests")
    listed = git("ls-tree", "-r", "--name-only", commit, "--", "benchmarks", "examples", "tests")
    files = set(listed.splitlines())
    command = re.sub(r"-m benchmarks[ .](\w+)", r"benchmarks/\1.py", COMMANDS[name])
    waiting = [word.partition(":")[0] for word in command.split()]
    found: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in NOT_DECIDING:
            continue
        folder = path.removesuffix("/__init__.py")  # a package may import its files by their names
        if path not in files or folder != path:
            inside = [file for file in files if file.startswith(f"{folder}/")]
            waiting += set(inside) - found - {path} if folder == path or path in files else []
        if path in files - found:
            found.add(path)
            waiting += mentioned(git("show", f"{commit}:{path}")) if path.endswith(".py") else []
    return (*package_files(commit, modules), *sorted(found))


def package_files(commit: str, modules: list[str] | None) -> tuple[str, ...]:
    """Return the files of these modules and what is no Python in the package, or the whole package for None."""
    if modules is None:
        return PACKAGE
    files = git("ls-tree", "-r", "--name-only", commit, "--", "src").splitlines()
    data = [file for file in files if not file.endswith(".py") and decides(file, modules, files)]
    places = ["src/" + module.replace(".", "/") for module in modules]
    loaded = {f"{place}{end}" for place in places for end in (".py", "/__init__.py")} & set(files)
    return (*PACKAGE[1:], *data, *sorted(loaded - NO_FIGURES))


def decides(data: str, modules: list[str], files: list[str]) -> bool:
    """Return whether a data file decides a run that loaded these modules.

    A contract whose claims are in a module of its name (library/attention/contract.yaml, library/softmax.contract.yaml
    and softmax.py) decides those that loaded it: nothing is judged without. All other data decide every run.
    """
    if not data.endswith("contract.yaml"):
        return True
    place = re.sub(r"(/|[.])contract[.]yaml$", "", data)
    if not {f"{place}.py", f"{place}/__init__.py"} & set(files):
        return True
    name = place.removeprefix("src/").replace("/", ".")
    return any(module == name or module.startswith(f"{name}.") for module in modules)


def mentioned(text: str) -> list[str]:
    """Return the files and folders of benchmarks, examples and tests that a Python file imports or names."""
    paths = re.findall(r"\b(?:examples|benchmarks|tests)(?:/[\w.-]+)+", text)
    paths += ["/".join(parts) for parts in re.findall(r'"(examples|tests)" / "([\w.]+)"', text)]
    imports = re.findall(
        r"^ *from ((?:benchmarks|tests)[\w.]*) import (\([^)]*\)|.*)$", text, re.MULTILINE
    )
    for module, names in imports:
        place = module.replace(".", "/")
        paths += [f"{place}.py", f"{place}/__init__.py"]
        paths += [f"{place}/{one}.py" for one in re.findall(r"\w+", names)]
    return paths


def modified_sources() -> str:
    """Return the sources that differ from the commit."""
    return git("status", "--porcelain", "--", *SOURCES, *(f":!{name}" for name in NOT_SOURCES))


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make(name: str, output: Path | None = None, commit: str = "HEAD") -> int:
    """Run the command of one record, or take its output from a file, and store it; return the exit code.

    A command that ends with 1 found something broken, which its record says. Any other exit code raises an error, and
    what was printed stays in build/records.
    """
    command, commit = COMMANDS[name], git("rev-parse", commit)  # it may move while the command runs
    record: dict = {"command": command.replace(" --json", ""), **describe_run(name, commit)}
    code = 0
    if output:
        printed = output.read_text()
    else:
        first, *rest = shlex.split(command)
        python = {"python": [sys.executable], "isobit": [sys.executable, "-m", "isobit"]}
        run, start = [*python.get(first, [first]), *rest], time.monotonic()
        printed, code, modules = run_and_watch(run)
        keep = ROOT / "build" / "records" / f"{name}.txt"
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_text(printed)
        if code not in (0, 1):
            raise subprocess.CalledProcessError(code, run)
        sources = sources_of(name, commit, modules)
        record |= {"sources": sources_digest(commit, sources), "modules": " ".join(modules)}
        record |= {"minutes": round((time.monotonic() - start) / 60, 1)}
        record |= {"exit": 1} if code else {}
    record |= read_json(json.loads(printed)) if "--json" in command else read_text(printed)
    if not record["tables"]:
        raise ValueError(f"{command} printed no table")
    save(name, record)
    return code


def run_and_watch(words: list[str]) -> tuple[str, int, list[str]]:
    """Run a command; return what it printed, its exit code, and the package's modules that its processes loaded."""
    with tempfile.TemporaryFile("w+") as printed:
        code, modules = watch(words, {}, printed)
        printed.seek(0)
        return printed.read(), code, modules


def watch(
    words: list[str], environment: dict[str, str], output: IO[str] | None = None
) -> tuple[int, list[str]]:
    """Run a command with more environment variables; return its exit code and the modules that were loaded."""
    paths = [str(Path(__file__).parent / "loading"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "modules"
        environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "ISOBIT_MODULES_LOADED": str(noted),
        }
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=output, check=False)
        modules = sorted(set(noted.read_text().split())) if noted.exists() else []
    if not modules:
        raise ValueError("no process of the command loaded a module of the package")
    return done.returncode, modules


def describe_run(name: str, commit: str) -> dict[str, str | int]:
    """Return the commit, sources, date, machine and version of the order of a run on this machine."""
    machine = fingerprint(VERSION)
    return {
        "commit": git("rev-parse", "--short=7", commit),
        "sources": sources_digest(commit, sources_of(name, commit)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.capability}"
        + " with AMX" * pairs_bf16(),
        "torch": machine.torch,
        "order": VERSION,
    }


def save(name: str, record: dict) -> None:
    """Write one record; its keys keep their order."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (RECORDS / f"{name}.json").write_text(text + "\n")


def read_text(printed: str) -> dict:
    """Separate the tables that Rich draws with box characters from the other printed lines."""
    tables, lines, above = [], [], ""
    for line in printed.splitlines():
        if line.startswith("┃"):
            tables.append({"header": cells(line, "┃"), "rows": []})
        elif line.startswith("│"):
            found, rows = cells(line, "│"), tables[-1]["rows"]
            if above.startswith("│") and goes_on(line, above):
                rows[-1] = [
                    " ".join(filter(None, pair)) for pair in zip(rows[-1], found, strict=True)
                ]
            else:
                rows.append(found)
        elif not re.match(r"[┏┡└├┗┣]", line):
            lines.append(line.rstrip())
        above = line
    return {"tables": tables, "lines": lines}


def goes_on(line: str, above: str) -> bool:
    """Return whether a line of a table is the rest of the row above, which was too wide.

    So a row that leaves out its first cell, because it is that of the row above, is a row of its own. Rich wraps only
    in a table that fills its console; consoles of benchmarks are 118 or a multiple of ten wide. Then the first cell is
    empty, and in each column that has words, the first of them had no room above.
    """
    parts, words = line.strip("│").split("│"), cells(line, "│")
    fills_console = len(line) == 118 or len(line) % 10 == 0
    filled = [
        (len(part) - 2, word, over)
        for part, word, over in zip(parts, words, cells(above, "│"), strict=True)
        if word
    ]
    no_room = (over and len(f"{over} {word.split()[0]}") > room for room, word, over in filled)
    return fills_console and not words[0] and all(no_room)


def cells(line: str, edge: str) -> list[str]:
    return [cell.strip() for cell in line.strip(edge).split(edge)]


def read_json(output: dict) -> dict:
    """Convert the JSON of a command to tables."""
    if "backend" in output:
        return read_backend(output["backend"], output["contracts"])
    if "contracts" in output:
        return read_verify(output)
    return read_chain(output) if "isobit" in output else read_curve(output)


def read_verify(output: dict) -> dict:
    header = ["contract", "level", "claims kept", "inputs", "compared", "planted", "proved by"]
    claims = [claim for contract in output["contracts"] for claim in contract["claims"]]
    contracts = sorted(output["contracts"], key=lambda found: (-found["level"], found["id"]))
    rows = []
    for found in contracts:
        engines = sorted({claim["proof"]["engine"] for claim in found["claims"] if claim["proof"]})
        numbers = count_claims(found["claims"])
        rows.append([found["id"], f"L{found['level']}", *numbers, ", ".join(engines)])
    kept = sum(found["verdict"] == "kept" for found in contracts)
    total = count_claims(claims)
    lines = [
        f"{kept} of {len(contracts)} contracts kept; {total[0]} claims kept; planted: {total[3]}",
        f"{total[1]} inputs, {total[2]} comparisons",
    ]
    return {"tables": [{"header": header, "rows": rows}], "lines": lines}


def read_backend(backend: dict, contracts: list[dict]) -> dict:
    """Return a row per contract, then a row per reason for what a backend is not held to."""
    header = ["contract", "verdict", "claims kept", "planted", "cases", "compared", "seconds"]
    rows = []
    missing = [
        found["id"] for found in contracts if not sum(c["compared"] for c in found["claims"])
    ]
    contracts = [found for found in contracts if found["id"] not in missing]
    for found in contracts:
        kept, _, compared, planted = count_claims(found["claims"])
        seconds = f"{sum(claim['seconds'] for claim in found['claims']):.0f}"
        cases = str(backend["cases_by_contract"][found["id"]])
        rows.append([found["id"], found["verdict"], kept, planted, cases, compared, seconds])
    reasons: dict[tuple[str, str], int] = {}
    for what in ("claims", "parts"):
        for left in backend[f"{what}_not_applicable"]:
            key = (what.replace("parts", "parts of claims"), left["reason"])
            reasons[key] = reasons.get(key, 0) + 1
    left_out = [[what, str(count), reason] for (what, reason), count in reasons.items()]
    claims = [claim for found in contracts for claim in found["claims"]]
    kept, _, compared, planted = count_claims(claims)
    whole = sum(found["verdict"] == "kept" for found in contracts)
    cases = sum(backend["cases_by_contract"][found["id"]] for found in contracts)
    lines = [
        f"{whole} of {len(contracts)} contracts kept; {kept} claims kept; planted: {planted}",
        f"{cases:,} of {backend['cases']:,} cases (the CPU's executors: {backend['cases_on_cpu']:,}),"
        f" {compared} comparisons",
        f"not judged: {', '.join(missing) or 'none'}",
    ]
    tables = [
        {"header": header, "rows": rows},
        {"header": ["not applicable", "number", "reason"], "rows": left_out},
    ]
    return {"tables": tables, "lines": lines}


def count_claims(claims: list[dict]) -> list[str]:
    """Return how many claims are kept, inputs, comparisons, and planted wrong subjects caught."""
    kept = sum(claim["verdict"] == "kept" for claim in claims)
    planted = [plant["caught"] for claim in claims for plant in claim["planted"]]
    inputs, compared = (sum(claim[key] for claim in claims) for key in ("inputs", "compared"))
    caught = f"{sum(planted)} of {len(planted)} caught"
    return [f"{kept} of {len(claims)}", f"{inputs:,}", f"{compared:,}", caught]


def read_chain(output: dict) -> dict:
    header = ["quantity", "layout", "isobit: differ", "stock: differ", "stock: largest difference"]
    rows = []
    for ours, stock in zip(output["isobit"]["rows"], output["stock"]["rows"], strict=True):
        largest = stock["aggregates"][0] if stock["aggregates"] else 0
        shown = f"{largest:.2g}" if largest else ""
        differ = [f"{side['differ']:,} of {side['numbers']:,}" for side in (ours, stock)]
        rows.append([ours["quantity"], ours["layout"], *differ, shown])
    return {"tables": [{"header": header, "rows": rows}], "lines": []}


def read_curve(output: dict) -> dict:
    """Return a row per side and dtype, then the digest that all layouts of isobit share, or how many there are."""
    header = [
        "side and dtype",
        "layouts",
        "steps",
        "loss curves",
        "digests of weights",
        "of gradients",
    ]
    header += ["of optimizer state", "losses differ by up to"]
    rows, lines = [], []
    for found in output["verdicts"]:
        name = f"{found['side']} {SHORT.get(found['dtype'], found['dtype'])}"
        counted = [found[key] for key in ("layouts", "steps", *DIGESTS)]
        apart = found["largest_difference"]
        rows.append([name, *map(str, counted), f"{apart:.2g}" if apart else "exactly 0"])
        digests = {
            one["digest"]
            for one in output["outcomes"]
            if (one["dtype"], one["stock"]) == (found["dtype"], found["side"] == "stock")
        }
        if found["side"] == "isobit":
            lines.append(f"{name}: digest {', '.join(sorted(digests))}")
    parameters = {one["curve"]["parameters"] for one in output["outcomes"]}
    size = " and ".join(f"{number:,}" for number in sorted(parameters))
    lines.insert(0, f"{size} parameters, {output['workload']['samples']} samples in a step")
    return {"tables": [{"header": header, "rows": rows}], "lines": lines}
