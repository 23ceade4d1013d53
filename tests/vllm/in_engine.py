"""Checks that need vLLM, run by the Python of .venv-vllm; prints one JSON object. See test_vllm_engine.py."""

import contextlib
import json
import os
import sys
from unittest import mock

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
# Twelve: packed weights are read for 9 to 32 rows, or, where the CPU computes in bf16, for more than 64.
PROMPTS = [[(7 * row + 3 * at) % 500 for at in range(140)] for row in range(12)]


def start(folder, **more):
    from vllm import LLM

    return LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=256,
        block_size=64,
        skip_tokenizer_init=True,
        **more,
    )


def generate(llm, prompts=None, **more):
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "logprobs": 0, "detokenize": False, **more}
    )
    asked = [{"prompt_token_ids": p} for p in (PROMPTS if prompts is None else prompts)]
    made = llm.generate(asked, params, use_tqdm=False)
    outputs = [output.outputs[0] for output in made]
    return [
        [list(o.token_ids), [r[t].logprob for t, r in zip(o.token_ids, o.logprobs, strict=True)]]
        for o in outputs
    ]


def attempt(call):
    """Return the message of the error that a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reload(llm, folder):
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.reset_prefix_cache()


@contextlib.contextmanager
def ignored_writes(state):
    """Plant packed weights that stay as they are; yield what makes written weights look unwritten to the kernels."""
    import torch

    from isobit.integrations.vllm.weights import PackedLinear
    from isobit.ops.linear.packed import PackedWeight

    def make_look_unwritten(model):
        for parameter in model.parameters():
            torch._lazy_clone(parameter.detach())

    with (
        mock.patch.object(PackedLinear, "drop", return_value=None),
        mock.patch.object(PackedWeight, "is_current", return_value=True),
    ):
        yield make_look_unwritten


def check_weights(first, second):
    """Update weights, with and without dropping packed forms and keys of the old ones; refuse requests; add a hook."""
    import isobit
    from isobit.integrations.vllm.preparing import STATE

    isobit.integrations.vllm.enable()
    llm = start(first)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    state = model.__dict__[STATE]
    said = {"first": generate(llm)}
    said["packed"] = [layer.is_packed for layer in state.packed]
    for parameter in model.parameters():  # as the second model was made
        parameter.data.mul_(1.25)
    llm.reset_prefix_cache()
    said["in place"] = generate(llm)
    with ignored_writes(state) as make_look_unwritten:
        reload(llm, first)
        make_look_unwritten(model)
        said["stale packs"] = generate(llm)
    reload(llm, second)
    said["second"] = generate(llm)
    said["packed again"] = [layer.is_packed for layer in state.packed]
    said["no seed"] = attempt(lambda: generate(llm, temperature=1.0))
    said["min_p"] = attempt(lambda: generate(llm, temperature=1.0, seed=1, min_p=0.5))
    said["after refused requests"] = generate(llm)
    layer = model.model.layers[0].mlp.down_proj
    hook = layer.register_forward_hook(lambda *_: None)
    said["hook"] = attempt(state.check)
    hook.remove()
    said["method"], layer.quant_method = layer.quant_method, None
    layer.quant_method, said["method"] = said["method"], attempt(state.check)
    said["as prepared"] = attempt(state.check)
    # The last: vLLM's scheduler keeps the requests of a step that raised.
    llm.collective_rpc("reload_weights", kwargs={"weights_path": first})
    said["stale keys"] = attempt(lambda: generate(llm))
    return said


def check_layouts(folder, _):
    """Generate in one batch, and some prompts alone; prompts are longer than a window of keys."""
    import isobit
    from isobit.integrations.vllm.serving import has_linear_attention

    isobit.integrations.vllm.enable()
    more = {"enable_prefix_caching": False} if has_linear_attention(folder) else {}
    llm = start(folder, max_num_batched_tokens=256, **more)
    return {
        "together": generate(llm),
        "alone": [generate(llm, [prompt])[0] for prompt in PROMPTS[:4]],
    }


def check_stock_layouts(folder, _):
    """The same by stock vLLM."""
    from isobit.integrations.vllm import serving

    llm = serving.start(folder, "bfloat16", 256, "stock")
    return {
        "together": generate(llm),
        "alone": [generate(llm, [prompt])[0] for prompt in PROMPTS[:4]],
    }


def check_stock(first, second):
    """Reload stock vLLM by the process of `Rollouts`, with and without packing a tied head, and start it afresh."""
    from isobit.integrations.vllm import serving

    llm = serving.start(first, "bfloat16", 256, "stock")
    said = {"first": generate(llm)}
    with mock.patch.object(serving, "pack_tied_head", return_value=None):
        serving.answer(llm, {"weights": second}, "stock")
    said["as vLLM reloads"] = generate(llm)
    serving.answer(llm, {"weights": second}, "stock")
    said["reloaded"] = generate(llm)
    said["fresh"] = generate(serving.start(second, "bfloat16", 256, "stock"))
    return said


def check_refusals(folder, _):
    """Make configurations that are not computed; nothing is loaded."""
    from vllm import EngineArgs

    import isobit

    def build(**more):
        return EngineArgs(model=folder, skip_tokenizer_init=True, **more).create_engine_config()

    isobit.integrations.vllm.enable()
    isobit.integrations.vllm.enable()
    cases = {
        "tensor parallel": {"tensor_parallel_size": 2},
        "quantization": {"quantization": "fp8"},
        "lora": {"enable_lora": True},
        "speculative": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "cache dtype": {"kv_cache_dtype": "fp8"},
        "logprobs": {"logprobs_mode": "raw_logits"},
        "worker": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        "architecture": {"hf_overrides": {"architectures": ["MistralForSequenceClassification"]}},
        "transfer": {"weight_transfer_config": {"backend": "nccl"}},
        "processors": {"logits_processors": ["isobit.no:Such"]},
        "dtype": {"hf_overrides": {"dtype": "float32"}},
    }
    said = {name: attempt(lambda more=more: build(**more)) for name, more in cases.items()}
    said["plain"] = build().parallel_config.worker_cls
    isobit.integrations.vllm.disable()
    said["disabled"] = build().parallel_config.worker_cls
    # By the worker's name alone, as vllm serve --worker-cls: refused before a process is started.
    ours = isobit.integrations.vllm.engine_arguments()
    said["by name"] = build(**ours).parallel_config.worker_cls
    for name in ("enforce_eager", "logprobs_mode"):
        said[name] = attempt(lambda name=name: build(**{k: ours[k] for k in ours if k != name}))
    said["stock of disabled"] = attempt(lambda: build(quantization="fp8", kv_cache_dtype="fp8"))
    said["options of requests"] = unknown_options()
    return said


# Options of a request that change no policy: how long it is, what is returned, and how.
HARMLESS = {"n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "flat_logprobs"}
HARMLESS |= {"prompt_logprobs", "prompt_logprob_start", "detokenize", "skip_special_tokens"}
HARMLESS |= {"spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"}
HARMLESS |= {"stream_interval", "skip_clone", "output_text_buffer_length", "repetition_detection"}
HARMLESS |= {"skip_reading_prefix_cache", "routed_experts_prompt_start"}


def unknown_options():
    """Return the options of vLLM's requests that isobit neither computes, nor refuses, nor knows as harmless."""
    import inspect

    from vllm import SamplingParams

    from isobit.integrations.vllm import refusals, sampler

    code = inspect.getsource(refusals.check_request) + inspect.getsource(sampler.read_draw)
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    return sorted(
        name for name in fields - HARMLESS if f'"{name}"' not in code and f".{name}" not in code
    )


if __name__ == "__main__":
    checks = {"weights": check_weights, "stock": check_stock, "refusals": check_refusals}
    checks |= {"layouts": check_layouts, "stock layouts": check_stock_layouts}
    found = checks[sys.argv[1]](*sys.argv[2:4])
    with open(sys.argv[4], "w") as file:
        json.dump(found, file)
