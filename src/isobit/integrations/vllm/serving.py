"""The process of `Rollouts`: answers requests for completions on standard input. See [Note: lines of JSON].

python -m isobit.integrations.vllm.serving FOLDER DTYPE MAX_MODEL_LEN isobit|stock
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from isobit.integrations.vllm.enabling import engine_arguments
from isobit.integrations.vllm.refusals import REQUEST

# How the engine runs here; none of them changes a result. What the environment has already wins.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def start(folder: str, dtype: str, max_model_len: int, engine: str) -> Any:
    """Return vLLM's engine with the weights in `folder`."""
    import torch
    from vllm import LLM

    torch._dynamo.config.disable = True  # stock vLLM compiles one count; nothing else is compiled
    arguments = engine_arguments() if engine == "isobit" else {"enforce_eager": True}
    if has_linear_attention(folder):
        arguments["enable_prefix_caching"] = False  # its states are of whole requests
    return LLM(
        model=folder,
        dtype=dtype,
        max_model_len=max_model_len,
        skip_tokenizer_init=True,
        **arguments,
    )


def has_linear_attention(folder: str) -> bool:
    """Return whether a checkpoint is of a model with layers of linear attention."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return "linear_attention" in (config.get("layer_types") or ())


def generate(llm: Any, asked: dict[str, Any], engine: str) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of each prompt."""
    from vllm import SamplingParams

    def params(number: int) -> Any:
        key: dict[str, Any] = {"seed": asked["seed"], "extra_args": {REQUEST: number}}
        if engine == "stock":
            key = {"seed": asked["seed"] + number}
        # Ends are those that were asked for, and not those of the checkpoint's configuration.
        return SamplingParams(
            logprobs=0, ignore_eos=True, detokenize=False, **key, **asked["params"]
        )

    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    made = llm.generate(prompts, [params(n) for n in asked["requests"]], use_tqdm=False)
    found = []
    for output in made:
        one = output.outputs[0]
        rows = zip(one.token_ids, one.logprobs, strict=True)
        found.append((list(one.token_ids), [row[token].logprob for token, row in rows]))
    return found


def pack_tied_head(model: Any) -> None:
    """Pack the weight of a tied head again, after stock vLLM 0.32 has reloaded it on the CPU.

    A checkpoint of a tied model has no lm_head, so vLLM reloads the embedding, which is the head's weight, too, but not
    the form of it that the head computes with. A control with a head of the first step would show more than numerics.
    """
    head = model.lm_head
    if head.weight is model.model.embed_tokens.weight:
        head.quant_method.process_weights_after_loading(head)


def answer(llm: Any, asked: dict[str, Any], engine: str) -> dict[str, Any]:
    """Reload weights, or generate."""
    if "weights" in asked:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": asked["weights"]})
        if engine == "stock":
            llm.apply_model(pack_tied_head)
        if not llm.reset_prefix_cache():  # its keys are of the weights before
            return {"error": "the prefix cache could not be reset: a request is running"}
        return {}
    return {"completions": generate(llm, asked, engine)}


def serve(requests: Iterable[str], answers: TextIO, options: list[str]) -> None:
    """Answer each line; end after an error, whose message is the last answer."""
    folder, dtype, length, engine = options
    try:
        llm = start(folder, dtype, int(length), engine)
        answers.write("{}\n")
        answers.flush()
        for line in requests:
            answers.write(json.dumps(answer(llm, json.loads(line), engine)) + "\n")
            answers.flush()
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        raise


def main() -> None:
    """Serve, with standard output kept for answers: what vLLM prints goes to standard error."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers, sys.argv[1:])


if __name__ == "__main__":
    main()
