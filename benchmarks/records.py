"""Records of runs: `python -m benchmarks record NAME` runs a command and stores what it printed.

A record is a JSON file in docs/results/records: the command, commit, date and machine, tables, and the
lines that were printed beside them. `python -m benchmarks pages` writes records into the pages.
"""

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from isobit.foundation.machine import fingerprint
from isobit.foundation.native import pairs_bf16
from isobit.order.plan import VERSION

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "results" / "records"
COMMANDS = {
    "one-run": "isobit gate training --workload whole --dtype float32 bfloat16 --stock --json",
    "model": "isobit gate model --model qwen3-0.6b --dtype bfloat16 --json",
    "contracts": "isobit verify isobit --json",
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
    "leaf": "python -m benchmarks leaf",
    "kernels": "python -m benchmarks kernels --quick",
    "binaries": "python -m benchmarks binaries --quick",
    "roofline": "python -m benchmarks roofline",
    "comparisons": "python -m benchmarks comparisons --quick",
    "candidates": "python -m benchmarks candidates",
    "post-training": "python -m benchmarks post_training",
    "families": "python -m benchmarks families --threads 1",
    "vllm": "python -m benchmarks vllm",
    "vllm-whole": "python -m benchmarks vllm_whole",
    "vllm-lora": "python -m benchmarks vllm_lora",
    "vllm-speed": ".venv-vllm/bin/python -m benchmarks.vllm_speed",
    "vllm-grpo": "python examples/grpo_vllm.py --steps 40",
    "gpu-contracts": "isobit verify isobit --backend interpreter --target sm_90 --json",
}


def main(words: list[str]) -> int:
    """Run the command of one record, or take its output from a file, and store it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks record")
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument("--output", type=Path, help="what the command printed, from an earlier run")
    parser.add_argument("--commit", default="HEAD", help="the commit of that run")
    options = parser.parse_args(words)
    command = COMMANDS[options.name]
    if options.output:
        printed = options.output.read_text()
    else:
        first, *rest = shlex.split(command)
        python = {"python": [sys.executable], "isobit": [sys.executable, "-m", "isobit"]}
        run = [*python.get(first, [first]), *rest]
        printed = subprocess.run(
            run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    record = {"command": command.replace(" --json", ""), **describe_run(options.commit)}
    record |= read_json(json.loads(printed)) if "--json" in command else read_text(printed)
    save(options.name, record)
    return 0


def describe_run(commit: str) -> dict[str, str | int]:
    """Return the commit, date, machine and version of the order of a run on this machine."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=7", commit]
    machine = fingerprint(VERSION)
    return {
        "commit": subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip(),
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
    tables, lines = [], []
    for line in printed.splitlines():
        if line.startswith("┃"):
            tables.append({"header": cells(line, "┃"), "rows": []})
        elif line.startswith("│"):
            tables[-1]["rows"].append(cells(line, "│"))
        elif not re.match(r"[┏┡└├┗┣]", line):
            lines.append(line.rstrip())
    return {"tables": tables, "lines": lines}


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
    verdicts = output["verdicts"]
    header = list(verdicts[0])
    rows = [[str(verdict[key]) for key in header] for verdict in verdicts]
    return {"tables": [{"header": header, "rows": rows}], "lines": []}
