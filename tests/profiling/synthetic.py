"""Small traces in Chrome's JSON, written event by event; and where real ones are, if they are there."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "data" / "traces"
if not CORPUS.exists():  # a worktree is one folder further down
    CORPUS = ROOT.parents[1] / "shared" / "data" / "traces"
V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB"}


class Chrome:
    """The events of one process. Times are in microseconds, as torch.profiler writes them."""

    def __init__(self, rank=0, world=1, device=V100):
        self.header = {"schemaVersion": 1, "deviceProperties": [device] if device else []}
        if world > 1:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.events, self.correlation = [], 0

    def add(self, category, name, start, end, pid=1, tid=1, **args):
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
        event |= {"ts": start, "dur": round(end - start, 3), "args": args}
        self.events.append(event)
        return event

    def step(self, number, start, end):
        return self.add("user_annotation", f"ProfilerStep#{number}", start, end)

    def note(self, name, start, end, **args):
        return self.add("user_annotation", name, start, end, **args)

    def operator(self, name, start, end, dims=None, types=None, tid=1, **args):
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": types or ["float"] * len(dims)}
        return self.add("cpu_op", name, start, end, tid=tid, **args)

    def call(self, name, start, end, **args):
        return self.add("cuda_runtime", name, start, end, **args)

    def kernel(
        self,
        name,
        start,
        end,
        launched=None,
        stream=7,
        category="kernel",
        call="cudaLaunchKernel",
        **args,
    ):
        """Add a kernel, and the call that launched it just before `launched` (default: its start)."""
        self.correlation += 1
        at = start if launched is None else launched
        self.call(call, at - 3, at, correlation=self.correlation)
        args |= {"correlation": self.correlation, "stream": stream, "device": 0}
        return self.add(category, name, start, end, pid=0, tid=stream, **args)

    def copy(self, name, start, end, size, **args):
        return self.kernel(
            f"Memcpy {name}",
            start,
            end,
            category="gpu_memcpy",
            call="cudaMemcpyAsync",
            bytes=size,
            **args,
        )

    def text(self):
        return json.dumps(self.header | {"traceEvents": self.events})

    def write(self, path):
        path.write_text(self.text())
        return path


def one_step():
    """A step of 1,000 µs on a GPU: 300 compute, 200 communication of which 50 hidden, 100 of a copy, the rest idle."""
    chrome = Chrome()
    chrome.step(1, 0, 1000)
    chrome.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 200)
    chrome.operator("aten::mm", 230, 300, [[64, 64], [64, 64]])
    chrome.kernel("sgemm", 300, 600, launched=290)
    chrome.kernel("ncclDevKernel_AllReduce_Sum_f32", 550, 750, launched=500, stream=20)
    chrome.copy("HtoD (Pageable -> Device)", 750, 850, 1000, launched=745)
    chrome.call("cudaStreamSynchronize", 850, 900)
    return chrome
