"""TRL's GRPOTrainer over an enabled model: keyed rollouts, and scores that equal theirs bit for bit.

[Note: what is replaced] TRL scores by its own head of stock operators, over the whole vocabulary. `OrderedGRPO` takes
log-probabilities and entropies from isobit instead, of the policy that sampled: with its temperature, over the tokens
that top-k and top-p kept. `generate()` draws by (seed, request, position), so rollouts do not depend on the batch, and
records the log-probability of each draw. With `rollouts=` vLLM draws the same, in a process of its own. While the
weights are those that sampled, every log-probability that the trainer computes is compared with the rollout's, and the
number that differ is logged as `isobit/rollout_logprobs_differ`. With `beta`, the reference model that TRL makes is
enabled too. Gradients are summed over micro-batches and ranks as divided_steps.py says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.bits import as_integers
from isobit.integrations.transformers.enabling import enable
from isobit.integrations.transformers.parts.lora import adapter_state
from isobit.integrations.transformers.sampling import KeyedSampling
from isobit.integrations.transformers.scoring import logprobs, logprobs_and_entropy
from isobit.integrations.transformers.state import require_state
from isobit.integrations.trl.divided_steps import DividedSteps
from isobit.integrations.trl.refusals import (
    refuse_engines,
    refuse_images,
    refuse_later_adapters,
    refuse_policies,
    refuse_stock_vllm,
    stock_trainer,
)
from isobit.integrations.vllm.rollouts import Rollouts
from isobit.sampling.drawing import Drawn
from isobit.sampling.support import Truncation

IGNORED = -100
REQUESTS_PER_RANK = 2**40


class RecordedSampling(KeyedSampling):
    """Keyed sampling for generate() that keeps the log-probability of every token that it drew.

    Attributes:
        drawn: What was drawn at each step of generate(), in order.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.drawn: list[Drawn] = []

    def draw(self, input_ids: Tensor, scores: Tensor) -> Drawn:
        """Draw, and keep tokens and log-probabilities."""
        found = super().draw(input_ids, scores)
        self.drawn.append(Drawn(found.tokens, found.logprobs, found.kept[:, :0]))
        return found


class OrderedGRPO(DividedSteps):
    """Mix in before a GRPOTrainer of TRL: `class Mine(OrderedGRPO, trl.GRPOTrainer)`. See [Note: what is replaced].

    The model must be enabled (`isobit.enable`) before the trainer is created.

    Args:
        rollouts: An `isobit.integrations.vllm.Rollouts`, which generates in the place of the model; its weights are
            updated before the rollout of each step. By default the model generates.

    Attributes:
        rollout_logprobs: log p of each completion of the last rollout, by the token ids of prompt and completion.
        compared: How many log-probabilities of the trainer were compared with the rollout's so far.
        differ: How many of them differ in a bit.

    Raises:
        UnsupportedError: For an option that changes the policy in a way that isobit cannot score: min_p,
            repetition_penalty, Liger's loss, continuous batching; and TRL's own way to vLLM.
    """

    # names of TRL's trainer
    accelerator: Any
    args: Any
    generation_config: Any
    model: Any
    ref_model: Any
    state: Any
    _metrics: Any

    eos_token_ids: list[int]
    max_completion_length: int

    def __init__(self, *given: Any, rollouts: Rollouts | None = None, **named: Any) -> None:
        """Create TRL's trainer, and check what it was asked for."""
        refuse_stock_vllm(named.get("args", given[2] if len(given) > 2 else None))
        refuse_later_adapters(named.get("peft_config"))
        super().__init__(*given, **named)
        require_state(self.accelerator.unwrap_model(self.model))
        refuse_policies(self.args)
        self.divide_steps()
        if getattr(self, "ref_model", None) is not None:
            enable_reference(self.accelerator.unwrap_model(self.ref_model))
        self.rollouts = rollouts
        if rollouts is not None:
            refuse_engines(self.accelerator)
        self.rollout_logprobs: dict[tuple[int, ...], Tensor] = {}
        self._rollout_step, self._requests = -1, 0
        self._rollout_adapters: tuple[Any, ...] = ()
        self.compared = self.differ = 0

    # ---- rollout ------------------------------------------------------------------------------------------

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        """Generate by TRL, or by vLLM, with keyed draws that are recorded."""
        model = self.accelerator.unwrap_model(self.model)
        is_new_step = self._rollout_step != self.state.global_step
        if is_new_step:
            self.rollout_logprobs.clear()
        self._rollout_step = self.state.global_step
        self._rollout_adapters = self._adapters(model)
        if self.rollouts is not None:
            if is_new_step:
                self.rollouts.update_weights(model)
            return self._generate_by_vllm(self.rollouts, *given, **named)
        with replaced_generate(model, self._generate_keyed):
            return super()._generate_single_turn(*given, **named)  # type: ignore[misc]

    def _adapters(self, model: Any) -> tuple[Any, ...]:
        """Return the state of a model's adapters: another one, as of a reference policy, is another policy."""
        return adapter_state(require_state(model).plan.wrappers)

    def _next_requests(self, count: int) -> range:
        """Return the numbers of the next requests, which no other draw of the run has."""
        first = self._requests + REQUESTS_PER_RANK * self.accelerator.process_index
        self._requests += count
        return range(first, first + count)

    def _generate_by_vllm(
        self,
        rollouts: Rollouts,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        *_: Any,
        **__: Any,
    ) -> tuple[list[list[int]], None]:
        """Return the completions that vLLM drew; TRL is given no log-probabilities, as there is nothing to correct."""
        refuse_images(False, {"images": images, **multimodal_fields})
        made = rollouts.generate(
            prompt_ids,
            seed=self.args.seed,
            requests=self._next_requests(len(prompt_ids)),
            max_tokens=self.max_completion_length,
            temperature=self.args.temperature,
            top_k=self.args.top_k,
            top_p=self.args.top_p,
            ends=self.eos_token_ids,
        )
        for prompt, (tokens, values) in zip(prompt_ids, made, strict=True):
            key = (*prompt, *tokens)
            self.rollout_logprobs[key] = torch.tensor(values, dtype=torch.float32)
        return [one.tokens for one in made], None

    def _generate_keyed(self, generate: Any, generation_config: Any, **inputs: Any) -> Tensor:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        draws = RecordedSampling(
            self.args.seed,
            self.args.temperature,
            self.args.top_k or None,
            self.args.top_p,
            self._next_requests(len(ids)),
            attention_mask=mask,
        )
        greedy = copy.deepcopy(generation_config)
        greedy.update(do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None)
        made: Tensor = generate(**inputs, generation_config=greedy, logits_processor=[draws])
        self._record(made, mask, draws, generation_config)
        return made

    def _record(self, made: Tensor, mask: Tensor, draws: RecordedSampling, config: Any) -> None:
        """Keep log p of each completion up to its end, under its own ids."""
        values = torch.stack([one.logprobs for one in draws.drawn], 1)  # [rows, steps]
        width, ends = mask.shape[1], ids_of(config.eos_token_id)
        for row in range(len(made)):
            tokens = made[row, width:].tolist()
            stop = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
            prompt = made[row, :width][mask[row].bool()].tolist()
            key = tuple(prompt + tokens[:stop])
            self.rollout_logprobs[key] = values[row, :stop].clone()

    # ---- scores -------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return log p and entropies of the completions, [B, logits_to_keep]."""
        refuse_images(compute_aux_loss, images)
        plain = self.accelerator.unwrap_model(model)
        rows = []
        for at in range(0, len(input_ids), batch_size or len(input_ids)):
            part = slice(at, at + (batch_size or len(input_ids)))
            rows.append(
                self._score(
                    plain, input_ids[part], attention_mask[part], logits_to_keep, compute_entropy
                )
            )
        found = torch.cat([one for one, _ in rows])
        entropies = (
            torch.cat([two for _, two in rows if two is not None]) if compute_entropy else None
        )
        is_policy = plain is self.accelerator.unwrap_model(self.model)
        if is_policy and self._adapters(plain) == self._rollout_adapters:
            self._check(found.detach(), input_ids, attention_mask)
        return found, entropies, None

    def _score(
        self, model: Any, ids: Tensor, mask: Tensor, kept: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        targets = torch.full_like(ids, IGNORED)
        targets[:, -kept - 1 : -1] = ids[:, -kept:].masked_fill(mask[:, -kept:] == 0, IGNORED)
        asked: dict[str, Any] = {"temperature": self.args.temperature, "targets": targets}
        truncation = Truncation(self.args.top_k or None, self.args.top_p)
        if truncates(self.args):
            asked["support"] = truncation
        part = slice(-kept - 1, -1)
        with self.accelerator.autocast():
            if entropy:
                found, entropies = logprobs_and_entropy(model, ids, mask, **asked)
                return found[:, part], entropies[:, part]
            return logprobs(model, ids, mask, **asked)[:, part], None

    def _check(self, found: Tensor, ids: Tensor, mask: Tensor) -> None:
        """Compare with the rollout, while the weights are those that sampled, and log how many differ."""
        if self.state.global_step != self._rollout_step:
            return
        compared = differ = 0
        kept = found.shape[1]
        for row in range(len(ids)):
            known = self.rollout_logprobs.get(tuple(ids[row][mask[row].bool()].tolist()))
            if known is None:
                continue
            count = int(mask[row, -kept:].sum())
            values = found[row, :count]
            compared += count
            if count != len(known):
                differ += count
            else:
                differ += int((as_integers(values.cpu()) != as_integers(known.cpu())).sum())
        self.compared += compared
        self.differ += differ
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["isobit/rollout_logprobs_compared"].append(float(compared))
        metrics["isobit/rollout_logprobs_differ"].append(float(differ))


def enable_reference(model: Any) -> None:
    """Enable the reference model that TRL made; TRL's forward, which it was given, is never called here."""
    vars(model).pop("forward", None)
    enable(model)


@contextmanager
def replaced_generate(model: Any, function: Any) -> Iterator[None]:
    """Give a model's generate() to `function(generate, generation_config, **inputs)` inside the block."""
    before = model.__dict__.get("generate")
    generate = model.generate
    model.generate = lambda generation_config=None, **inputs: function(
        generate, generation_config, **inputs
    )
    try:
        yield
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before


def ids_of(ends: Any) -> set[int]:
    """Return the ids that end a completion."""
    if ends is None:
        return set()
    return {int(ends)} if isinstance(ends, int) else {int(one) for one in ends}


def truncates(args: Any) -> bool:
    """Return whether sampling leaves tokens out."""
    return bool((args.top_k or 0) > 0 or (args.top_p is not None and args.top_p < 1))


if TYPE_CHECKING:
    GRPOTrainer = Any


def __getattr__(name: str) -> Any:
    """Return `GRPOTrainer`: TRL's with `OrderedGRPO` mixed in. TRL is imported here and not before."""
    if name != "GRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = stock_trainer("GRPOTrainer")
    made = type(
        "GRPOTrainer",
        (OrderedGRPO, stock),
        {"__doc__": OrderedGRPO.__doc__, "__module__": __name__},
    )
    globals()["GRPOTrainer"] = made
    return made
