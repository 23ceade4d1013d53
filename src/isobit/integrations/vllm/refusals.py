"""Configurations and requests of vLLM that isobit does not compute, each refused by name.

Plain attributes are read, and nothing of vLLM is imported, so that tests run without it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.parts.rotary import ROTARY_KINDS

WORKER = "isobit.integrations.vllm.worker.Worker"
LOGPROBS = "processed_logprobs"
REQUEST = "isobit_request"  # in SamplingParams.extra_args: the number of a request, by default 0
GREEDY = 1e-5  # vLLM's own bound: a lower temperature means greedy


def refuse(expected: str, received: str, remedy: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(expected=expected, received=received, remedy=remedy)


def check_engine(config: Any) -> None:
    """Raise on the parts of a VllmConfig that the operators do not compute."""
    check_model(config.model_config)
    if config.quant_config is not None or config.model_config.quantization is not None:
        refuse(
            "weights as the trainer has them",
            f"quantization={config.model_config.quantization!r}",
            "load the model without quantization",
        )
    if config.lora_config is not None:
        refuse("no LoRA adapters", "enable_lora=True", "merge the adapter into the weights")
    if config.model_config.logits_processors:
        refuse(
            "logits of the model",
            f"logits_processors={config.model_config.logits_processors!r}",
            "leave logits_processors out: a trainer does not score them",
        )
    for name in ("watermark_config", "diffusion_config", "engram_config"):
        if getattr(config, name, None) is not None:
            refuse("tokens drawn from the model's logits", name, f"leave {name} out")
    if config.speculative_config is not None:
        refuse(
            "one token per step and request",
            "speculative decoding",
            "leave speculative_config out: its acceptance depends on draft and batch",
        )
    if getattr(config.cache_config, "mamba_cache_mode", "none") != "none":
        refuse(
            "states of linear attention that belong to one request",
            "prefix caching of a model with linear attention",
            "pass enable_prefix_caching=False (--no-enable-prefix-caching)",
        )
    if config.kv_transfer_config is not None:
        refuse("keys of this engine", "a KV connector", "leave kv_transfer_config out")
    transfer = config.weight_transfer_config
    if transfer is not None and transfer.backend != "isobit":
        refuse(
            'weight transfer by the backend "isobit", or none',
            f"weight_transfer_config with backend {transfer.backend!r}, which needs GPUs",
            """pass --weight-transfer-config '{"backend": "isobit"}', or update by reload_weights""",
        )
    parallel = config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            refuse(f"{name}=1", f"{name}={getattr(parallel, name)}", "serve the model whole")
    check_execution(config)


def check_model(model: Any) -> None:
    """Raise on what the configuration alone shows; modules are checked when the model is made (preparing.py)."""
    found = tuple(model.architectures or ())
    if len(found) != 1 or not found[0].endswith("ForCausalLM"):
        refuse(
            "one architecture of a causal language model, …ForCausalLM",
            ", ".join(found) or "none",
            "serve a causal language model",
        )
    if model.is_multimodal_model:
        refuse("a text model", "a multi-modal model", "serve its language model alone")
    if model.runner_type != "generate":
        refuse("a model that generates", f"runner={model.runner_type!r}", 'pass runner="generate"')
    config = model.hf_text_config
    if not getattr(config, "is_causal", True):
        refuse("causal attention", "is_causal=False", "serve a decoder")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ROTARY_KINDS:
        refuse(
            f"rotary frequencies that are constants: {', '.join(ROTARY_KINDS)}",
            f"rope_type={kind!r}",
            "choose a constant kind, e.g. yarn",
        )
    if getattr(model, "head_dtype", model.dtype) not in (None, model.dtype):
        refuse("a head in the model's dtype", f"head_dtype={model.head_dtype}", "leave it out")


def check_execution(config: Any) -> None:
    """Raise on ways of running that would put other operators in the place of ours."""
    if not config.model_config.enforce_eager:
        refuse(
            "eager execution",
            "enforce_eager=False, which compiles the model",
            "pass enforce_eager=True (--enforce-eager)",
        )
    if config.cache_config.cache_dtype not in ("auto", str(config.model_config.dtype)[6:]):
        refuse(
            "keys and values in the model's dtype",
            f"kv_cache_dtype={config.cache_config.cache_dtype!r}",
            'pass kv_cache_dtype="auto"',
        )
    if config.device_config.device_type != "cpu":
        refuse(
            "the CPU",
            f"device {config.device_config.device_type!r}",
            "this version serves vLLM's CPU platform",
        )
    if config.use_v2_model_runner:
        refuse(
            "vLLM's model runner V1, whose sampler is replaced",
            "model runner V2",
            "unset VLLM_USE_V2_MODEL_RUNNER, or set it to 0",
        )
    if config.model_config.logprobs_mode != LOGPROBS:
        refuse(
            f"logprobs_mode={LOGPROBS!r}: log-probabilities of the policy that sampled",
            f"logprobs_mode={config.model_config.logprobs_mode!r}",
            f'pass logprobs_mode="{LOGPROBS}" (--logprobs-mode {LOGPROBS})',
        )


def check_request(params: Any) -> None:
    """Raise on sampling options that change the policy in a way that a trainer's score does not have."""
    changed = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "min_tokens": 0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "structured_outputs": None,
        "logprob_token_ids": None,
        "prompt_logprob_token_ids": None,
        "thinking_token_budget": None,
        "trace_decode_token_ids": None,
        "watermarking": False,
    }
    for name, plain in changed.items():
        value = getattr(params, name, plain)
        if not is_absent(value, plain):
            raise ArgumentError(
                expected="a policy that the trainer can score: temperature, top_k and top_p",
                received=f"{name}={value!r}",
                remedy=f"leave {name} out; if the request has none, it is from the model's "
                "generation_config.json: start the server with --generation-config vllm",
            )
    check_number(params.extra_args or {})
    if params.temperature >= GREEDY and params.seed is None:
        raise ArgumentError(
            expected="seed= where tokens are drawn: with the position it is the key of a draw",
            received=f"temperature={params.temperature} and no seed",
            remedy="pass SamplingParams(seed=...), another for each request; with n > 1 vLLM adds 0, 1, ... to it",
        )


def is_absent(value: Any, plain: Any) -> bool:
    """Return whether an option is not given: None, empty, or the number that changes nothing."""
    if isinstance(value, list | dict | str):
        return not value
    return value is None or (isinstance(value, int | float) and value == plain)


def check_number(given: Any) -> None:
    """Raise unless the extra arguments that are isobit's are a request's number."""
    for name, value in given.items():
        if name.startswith("isobit") and (name != REQUEST or type(value) is not int):
            raise ArgumentError(
                expected=f"extra_args with {REQUEST}= an integer, and no others of isobit",
                received=f"{name}={value!r}",
                remedy=f'pass extra_args={{"{REQUEST}": 5}}, or leave it out',
            )


def check_dtype(asked: Any, model: Any) -> None:
    """Raise if vLLM chose another dtype than the checkpoint's, which nobody asked for."""
    stored = getattr(model.hf_config, "dtype", None)
    stored, chosen = (str(one).removeprefix("torch.") for one in (stored, model.dtype))
    if asked == "auto" and stored not in ("None", chosen):
        refuse(
            "the dtype of the checkpoint, or one that was asked for by name",
            f'dtype="auto", by which vLLM turns {stored} into {chosen}',
            f'pass dtype="{stored}", or dtype="{chosen}" and train with it (--dtype)',
        )
