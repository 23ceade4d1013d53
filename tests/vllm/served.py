"""Start `vllm serve` from .venv-vllm for a test, and stop it."""

import os
import random
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

from benchmarks import vllm as rollouts
from isobit.errors import ServerError
from isobit.foundation.http_json import Server

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache, /collective_rpc and /weight_checker
    "HF_HUB_OFFLINE": "1",
}
ISOBIT = [
    "--enforce-eager",
    "--logprobs-mode=processed_logprobs",
    "--worker-cls=isobit.integrations.vllm.worker.Worker",
    '--weight-transfer-config={"backend": "isobit"}',
]
STOCK = ["--enforce-eager"]
SECONDS = 600  # for a server to start, on a busy machine


@contextmanager
def serve(folder, options, log):
    """Yield the address of a server of a folder's model, named tiny."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` needs a distribution named vllm, which the build for the CPU is not; this is the same server.
    command = [str(rollouts.PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        f"--model={folder}",
        "--served-model-name=tiny",
        "--host=127.0.0.1",
        f"--port={port}",
        *options,
    ]
    command += ["--dtype=bfloat16", "--max-model-len=512", "--block-size=64"]
    command += ["--skip-tokenizer-init", "--enable-prompt-tokens-details"]
    with log.open("w") as out:
        started = subprocess.Popen(
            command,
            cwd=rollouts.ROOT,
            env=os.environ | SETTINGS,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(started, Server(address, timeout=5), log)
            yield address
        finally:
            if started.poll() is None:
                stop(started)


def stop(started):
    """End a server and the processes that it started."""
    os.killpg(started.pid, signal.SIGTERM)
    try:
        started.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)


def wait_for(started, server, log):
    """Return when a server answers."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert started.poll() is None, log.read_text()[-3000:]
        try:
            if server.get("/health").status == 200:
                return
        except ServerError:
            time.sleep(1)
    raise AssertionError(f"no server after {SECONDS} s:\n{log.read_text()[-3000:]}")


def make_prompts(count, words, seed=0):
    """Return prompts of token ids, of half as many to `words` tokens."""
    draw = random.Random(seed)
    lengths = [words - at * words // (2 * count) for at in range(count)]
    return [[draw.randrange(500) for _ in range(length)] for length in lengths]
