"""Delay one rank of a recorded run before one collective, for one cause, and move what depends on it."""

import copy
import json
import tarfile

from isobit.profiling.trace import read_trace
from isobit.profiling.trace_files import Source

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
CAUSES = {
    "compute": "compute",
    "data loader": "idle: data loader",
    "sync": "idle: host waits for the device",
}


def read_archive(path):
    """Return {rank: document} of a tar archive of traces."""
    with tarfile.open(path) as archive:
        files = [archive.extractfile(m) for m in archive if m.name.endswith(".json")]
        documents = [json.load(file) for file in files]
    return {document["distributedInfo"]["rank"]: document for document in documents}


def slices(document):
    return [e for e in document["traceEvents"] if e.get("ph") == "X" and "ts" in e]


def collectives(document):
    found = [e for e in slices(document) if e["cat"] == "kernel" and "nccl" in e["name"]]
    return sorted(found, key=lambda e: e["ts"])


def end(event):
    return event["ts"] + event["dur"]


def issued(event, launches):
    """When the host launched a slice of the device; else when a slice starts."""
    on_device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
    return launches.get(event["args"].get("correlation"), event["ts"]) if on_device else event["ts"]


def plant(documents, rank, number, cause, delay):
    """Return the run with a rank later by `delay` µs at its collective `number`; None without a kernel to stretch."""
    documents = copy.deepcopy(documents)
    per = {k: collectives(document) for k, document in documents.items()}
    own = slices(documents[rank])
    steps = [e["ts"] for e in own if e["name"].startswith("ProfilerStep")]
    begin = end(per[rank][number - 1]) if number else min(steps)
    arrival = per[rank][number]["ts"]
    last = max(found[number]["ts"] for found in per.values())
    before = {k: end(found[number]) for k, found in per.items()}
    launches = {e["args"].get("correlation"): e["ts"] for e in own if e["cat"] == "cuda_runtime"}
    # The host delays only what it has not launched yet.
    launched = launches.get(per[rank][number]["args"]["correlation"], arrival)
    stretched, at = None, min((begin + arrival) // 2, launched - 1)
    if cause == "compute":
        inside = [
            e
            for e in own
            if e["cat"] == "kernel"
            and "nccl" not in e["name"]
            and begin <= e["ts"]
            and end(e) <= arrival
        ]
        if not inside:
            return None
        stretched = max(inside, key=lambda e: e["dur"])
        at = stretched["ts"]
    host = {"cpu_op", "user_annotation", "cuda_runtime", "python_function"}
    for event in own:
        if event is stretched:
            event["dur"] += delay
        elif issued(event, launches if stretched is None else {}) > at:
            event["ts"] += delay
        elif end(event) > at and event["cat"] in host:
            event["dur"] += delay
    if cause != "compute":
        thread = next(e for e in own if e["name"].startswith("ProfilerStep"))
        kind = (
            ("user_annotation", LOADER)
            if cause == "data loader"
            else ("cuda_runtime", "cudaStreamSynchronize")
        )
        planted = {"ph": "X", "cat": kind[0], "name": kind[1], "ts": at, "dur": delay, "args": {}}
        documents[rank]["traceEvents"].append(
            planted | {"pid": thread["pid"], "tid": thread["tid"]}
        )
    # The collective now ends later on every rank, and with it everything that follows.
    later = max(found[number]["ts"] for found in per.values()) - last
    for k, document in documents.items():
        moved = delay if k == rank else 0
        for event in slices(document):
            if event is per[k][number]:
                continue
            if event["ts"] >= before[k] + moved:
                event["ts"] += later - moved
            elif end(event) > before[k] + moved and event["cat"] in host:
                event["dur"] += later - moved
        per[k][number]["dur"] = before[k] + later - per[k][number]["ts"]
    return documents


def traces_of(documents):
    for rank, document in documents.items():
        text = json.dumps(document).encode()
        yield read_trace(Source(f"rank{rank}.json", iter([text])))
