"""Rollouts of one model by vLLM in many layouts, compared bit for bit; run by the Python of .venv-vllm.

Prints one JSON line per axis and writes what was generated alone, for the trainer to score:

    .venv-vllm/bin/python -m benchmarks.vllm_rollouts --model FOLDER --dtype bfloat16 --engine isobit --out FILE
"""

import argparse
import gc
import json
import os
import random
import struct

SETTINGS = {  # read by vLLM, which runs in this process so that its scheduler can be counted
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
# How each request is sampled, in turn: temperature, top_k, top_p. Stock vLLM decodes greedily: on the CPU it ends with
# "CPU Generator does not use offset" where a prompt of a request with a seed is chunked.
KINDS = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 0.9), (0.0, 0, 1.0))
ENGINES = {  # name: arguments of vLLM, and the axes that are compared with them
    "pages of 64": ({"block_size": 64}, ("batch", "arrival", "prefix cache", "threads")),
    "chunks of 16, pages of 16": (
        {
            "block_size": 16,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
        },
        ("batch",),
    ),
    "chunks of 50, pages of 32, preemption": (
        {"block_size": 32, "max_num_batched_tokens": 50, "num_gpu_blocks_override": 22},
        ("batch", "preemption"),
    ),
    "pages of 128": ({"block_size": 128, "enable_prefix_caching": False}, ("batch",)),
}


def bits(value):
    """Return the bytes of a number: zeros of two signs differ, and equal NaNs do not."""
    return struct.pack("<d", value)


def make_prompts(vocabulary, count, longest, shared):
    """Return prompts of 5 tokens to `longest`; every second one begins with the same `shared` tokens."""
    draw = random.Random(0)
    first = [draw.randrange(vocabulary) for _ in range(shared)]
    return [
        (first if row % 2 else [])
        + [draw.randrange(vocabulary) for _ in range(5 + draw.randrange(longest - shared - 4))]
        for row in range(count)
    ]


class Rollouts:
    """One engine, the prompts, and what they gave alone."""

    def __init__(self, options, prompts):
        self.options, self.prompts = options, prompts
        self.reference, self.counts = None, {}
        self.llm, self.name, self.preemptions, self.cached = None, None, 0, 0

    def start(self, name):
        from vllm import LLM

        import isobit

        ours = isobit.integrations.vllm.engine_arguments()
        arguments = ours
        if self.options.engine == "stock":  # its pages are multiples of 32
            arguments = {
                "enforce_eager": True,
                "block_size": max(32, ENGINES[name][0]["block_size"]),
            }
        self.llm = None
        gc.collect()
        self.llm = LLM(
            model=self.options.model,
            dtype=self.options.dtype,
            max_model_len=256,
            skip_tokenizer_init=True,
            **{**ENGINES[name][0], **arguments},
        )
        self.name = name
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*given, **named):
            self.preemptions += 1
            return preempt(*given, **named)

        scheduler._preempt_request = counted

    def params(self, row, with_prompt):
        from vllm import SamplingParams

        temperature, top_k, top_p = KINDS[
            row % len(KINDS) if self.options.engine == "isobit" else 0
        ]
        return SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=1000 + row,
            max_tokens=self.options.new,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if with_prompt else None,
            detokenize=False,
        )

    def run(self, size, order=None, with_prompt=True):
        """Generate in batches of `size`; return {row: (tokens, log-probabilities)}."""
        order = list(range(len(self.prompts))) if order is None else order
        found = {}
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            made = self.llm.generate(
                [{"prompt_token_ids": self.prompts[row]} for row in rows],
                [self.params(row, with_prompt) for row in rows],
                use_tqdm=False,
            )
            for row, output in zip(rows, made, strict=True):
                found[row] = read(output)
                self.cached += output.num_cached_tokens or 0
        return found

    def run_staggered(self, order):
        """Add a request after every second step."""
        engine, found = self.llm.llm_engine, {}
        waiting, steps = list(order), 0
        while waiting or engine.has_unfinished_requests():
            if waiting and steps % 2 == 0:
                row = waiting.pop(0)
                prompt = {"prompt_token_ids": self.prompts[row]}
                engine.add_request(f"late-{steps}-{row}", prompt, self.params(row, True))
            for output in engine.step():
                if output.finished:
                    found[int(output.request_id.split("-")[2])] = read(output)
            steps += 1
        return found

    def compare(self, axis, found):
        """Count log-probabilities and tokens that differ from those of the requests alone."""
        said = self.counts.setdefault(
            axis, {"compared": 0, "different": 0, "tokens": 0, "other tokens": 0, "largest": 0.0}
        )
        for row, (tokens, generated, prompt) in found.items():
            alone_tokens, alone_generated, alone_prompt = self.reference[row]
            said["tokens"] += len(tokens)
            said["other tokens"] += sum(a != b for a, b in zip(tokens, alone_tokens, strict=True))
            pairs = list(zip(generated, alone_generated, strict=True))
            pairs += zip(prompt, alone_prompt, strict=True) if prompt else ()
            said["compared"] += len(pairs)
            said["different"] += sum(bits(a) != bits(b) for a, b in pairs)
            said["largest"] = max(said["largest"], *(abs(a - b) for a, b in pairs))


def read(output):
    """Return tokens, their log-probabilities, and those of the prompt."""
    made = output.outputs[0]
    generated = [
        row[token].logprob for token, row in zip(made.token_ids, made.logprobs, strict=True)
    ]
    prompt = [
        row[token].logprob
        for token, row in zip(
            output.prompt_token_ids[1:], (output.prompt_logprobs or [None])[1:], strict=False
        )
    ]
    return list(made.token_ids), generated, prompt


def run_axes(rollouts, axes, sizes, set_threads):
    """Compare along the axes of one engine."""
    name, shuffled = rollouts.name, list(range(len(rollouts.prompts)))
    random.Random(1).shuffle(shuffled)
    if rollouts.reference is None:
        rollouts.reference = rollouts.run(1)
        sizes = [size for size in sizes if size > 1]
    for size in sizes:
        rollouts.compare(f"batch, {name}", rollouts.run(size))
    if "arrival" in axes:
        rollouts.compare("arrival", rollouts.run(16, shuffled))
        rollouts.compare("arrival", rollouts.run(5, shuffled[::-1]))
        rollouts.compare("arrival", rollouts.run_staggered(shuffled))
    if (
        "prefix cache" in axes
    ):  # vLLM reads no cached prefix where log-probabilities of the prompt are wanted
        before = rollouts.cached
        rollouts.compare("prefix cache", rollouts.run(16, with_prompt=False))
        rollouts.compare("prefix cache", rollouts.run(3, shuffled, with_prompt=False))
        rollouts.counts["prefix cache"]["cached tokens"] = rollouts.cached - before
    if "preemption" in axes:
        rollouts.counts[f"batch, {name}"]["preemptions"] = rollouts.preemptions
    if "threads" in axes:
        set_threads(2)
        rollouts.compare("2 threads", rollouts.run(16))
        rollouts.compare("2 threads", rollouts.run(1))
        set_threads(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--engine", choices=("isobit", "stock"), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--engines", type=int, default=len(ENGINES))
    parser.add_argument("--new", type=int, default=16, help="tokens per request")
    parser.add_argument("--longest", type=int, default=234, help="prompt, in tokens")
    parser.add_argument("--shared", type=int, default=70, help="tokens of a common prefix")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 5, 8, 16])
    parser.add_argument("--axes", nargs="*", default=["arrival", "prefix cache", "threads"])
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    import torch

    set_threads = torch.set_num_threads  # vLLM replaces it
    set_threads(1)
    torch._dynamo.config.disable = True  # stock compiles the count of ranks anew for each process
    with open(os.path.join(options.model, "config.json")) as file:
        vocabulary = json.load(file)["vocab_size"]
    prompts = make_prompts(vocabulary, options.requests, options.longest, options.shared)
    rollouts = Rollouts(options, prompts)
    for name, (_, axes) in list(ENGINES.items())[: options.engines]:
        rollouts.start(name)
        sizes = options.sizes if name == next(iter(ENGINES)) else (4, 16)
        axes = [axis for axis in axes if axis in (*options.axes, "preemption")]
        run_axes(rollouts, axes, sizes, set_threads)
        print(json.dumps({"engine": name}), flush=True)
    with open(options.out, "w") as file:
        kinds = [KINDS[row % len(KINDS)] for row in range(options.requests)]
        json.dump(
            {
                "counts": rollouts.counts,
                "prompts": rollouts.prompts,
                "kinds": kinds,
                "reference": [rollouts.reference[row] for row in range(options.requests)],
            },
            file,
        )


if __name__ == "__main__":
    main()
