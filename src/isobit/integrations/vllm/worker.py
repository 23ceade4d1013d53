"""vLLM's worker and model runner with isobit's operators; vLLM imports it by name in the worker's process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from isobit.comparing.checkpoints.weight_digests import digest_weights, digests_to_json
from isobit.integrations.vllm.package import library
from isobit.integrations.vllm.plugin import register
from isobit.integrations.vllm.preparing import STATE, prepare
from isobit.integrations.vllm.refusals import check_engine, refuse
from isobit.integrations.vllm.sampler import draw_tokens, policy_logprobs, read_draw

# Digests of the weights that a vLLM model serves, under vLLM's names: fused, and without the rows of padding.


def digest_served(model: nn.Module) -> str:
    """Return the digests of a model's weights as JSON."""
    return digests_to_json(digest_weights(served_weights(model)))


def served_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by name. vLLM pads the vocabulary; rows after the model's own are not served."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            data = weight.detach()
            if isinstance(module, VocabParallelEmbedding):
                data = data[: module.org_vocab_size]
            found[f"{prefix}.{name}" if prefix else name] = data
    return found


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Return the log-probabilities of the given and of the most likely tokens, and the rank of the given.

    As vLLM's, which is compiled for each new shape; ranks are counts.
    """
    largest, indices = torch.topk(logprobs, num_logprobs, dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    return LogprobsTensors(
        logprob_token_ids=torch.cat((token_ids.unsqueeze(-1), indices), dim=1).to(torch.int32),
        logprobs=torch.cat((chosen, largest), dim=1),
        selected_token_ranks=(logprobs >= chosen).sum(-1),
    )


class OrderedSampler(Sampler):
    """vLLM's sampler with isobit's log-softmax; tokens are drawn by the runner, which knows the requests."""

    compute_logprobs = staticmethod(policy_logprobs)
    gather_logprobs = staticmethod(gather_logprobs)

    def forward(self, *given: Any, **named: Any) -> SamplerOutput:
        """Raise: draws need the requests' seeds and positions."""
        refuse("draws by the runner", "a call of the sampler alone", "call runner._sample")


class Runner(CPUModelRunner):
    """vLLM's model runner for the CPU, with a prepared model and keyed draws."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.sampler = OrderedSampler(logprobs_mode=self.model_config.logprobs_mode)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the model; its computations are replaced after it is made, before weights are read and processed."""
        if load_dummy_weights:
            refuse("weights of a checkpoint", "dummy weights", "load the model's weights")
        loader = get_model_loader(self.vllm_config.load_config)
        create = loader.create_model

        def create_prepared(*given: Any, **named: Any) -> Any:
            model = create(*given, **named)
            prepare(model, self.vllm_config)
            return model

        loader.create_model = create_prepared
        self.model = loader.load_model(vllm_config=self.vllm_config, model_config=self.model_config)

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        """Draw a token for each request of the step."""
        if logits is None or spec_decode_metadata is not None:
            refuse("one row of logits per request", "speculative decoding", "leave it out")
        metadata = self.input_batch.sampling_metadata
        # Draws have no generator; vLLM would rewind those of the CPU after a chunk of a prompt, which torch cannot.
        self.input_batch.generators.clear()
        requests = [self.requests[name] for name in self.input_batch.req_ids]
        draws = [read_draw(request.sampling_params, request.num_tokens) for request in requests]
        state = self.model.__dict__[STATE]
        tokens, policy = state.strictness.run(
            self.model,
            ("draw", bool(metadata.all_greedy)),
            lambda: draw_tokens(logits, draws),
        )
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1),
            logprobs_tensors=self._gather_logprobs(policy, tokens),
        )

    def _gather_logprobs(self, policy: Tensor, tokens: Tensor) -> LogprobsTensors | None:
        metadata = self.input_batch.sampling_metadata
        wanted = metadata.max_num_logprobs
        if wanted is None:
            return None
        logprobs = policy_logprobs(policy)
        if wanted == -1:
            return LogprobsTensors(torch.empty(0), logprobs, torch.empty(0))
        return gather_logprobs(logprobs, wanted, tokens)


class Worker(CPUWorker):
    """vLLM's worker for the CPU with isobit's runner; raises on a configuration that isobit does not compute."""

    def __init__(self, vllm_config: Any, *given: Any, **named: Any) -> None:
        library()
        check_engine(vllm_config)
        register()
        super().__init__(vllm_config, *given, **named)

    def init_device(self) -> None:
        """Start the worker's process group, then make isobit's runner in the place of vLLM's."""
        super().init_device()
        self.model_runner = Runner(self.vllm_config, torch.device("cpu"))

    def isobit_weight_digests(self) -> str:
        """Return the digests of the weights that are served, for `isobit.rollout.served_weights`."""
        return digest_served(self.model_runner.model)
