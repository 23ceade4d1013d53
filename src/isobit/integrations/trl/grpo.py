"""TRL's GRPOTrainer over an enabled model: keyed rollouts, and scores that equal theirs bit for bit.

[Note: what is replaced] TRL scores by its own head of stock operators, over the whole vocabulary. `OrderedGRPO` takes
log-probabilities and entropies from isobit instead, of the policy that sampled: with its temperature, over the tokens
that top-k and top-p kept. `generate()` draws by (seed, request, position), so rollouts do not depend on the batch, and
records the log-probability of each draw. While the weights are those that sampled, every log-probability that the
trainer computes is compared with the rollout's, and the number that differ is logged as
`isobit/rollout_logprobs_differ`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.bits import as_integers
from isobit.errors import UnsupportedError
from isobit.integrations.transformers.scoring import logprobs, logprobs_and_entropy
from isobit.integrations.transformers.state import require_state
from isobit.integrations.trl.recorded_sampling import RecordedSampling
from isobit.sampling.support import Truncation

IGNORED = -100
REQUESTS_PER_RANK = 2**40


class OrderedGRPO:
    """Mix in before a GRPOTrainer of TRL: `class Mine(OrderedGRPO, trl.GRPOTrainer)`. See [Note: what is replaced].

    The model must be enabled (`isobit.enable`) before the trainer is created.

    Attributes:
        rollout_logprobs: log p of each completion of the last rollout, by the token ids of prompt and completion.
        compared: How many log-probabilities of the trainer were compared with the rollout's so far.
        differ: How many of them differ in a bit.

    Raises:
        UnsupportedError: For an option that changes the policy in a way that isobit cannot score: min_p,
            repetition_penalty, Liger's loss, continuous batching.
    """

    # names of TRL's trainer
    accelerator: Any
    args: Any
    generation_config: Any
    model: Any
    state: Any
    _metrics: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create TRL's trainer, and check what it was asked for."""
        super().__init__(*given, **named)
        require_state(self.accelerator.unwrap_model(self.model))
        refuse_policies(self.args)
        self.rollout_logprobs: dict[tuple[int, ...], Tensor] = {}
        self._rollout_step, self._requests = -1, 0
        self.compared = self.differ = 0

    # ---- rollout ------------------------------------------------------------------------------------------

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        """Generate by TRL, with keyed draws that are recorded."""
        model = self.accelerator.unwrap_model(self.model)
        if getattr(self, "use_vllm", False):
            return super()._generate_single_turn(*given, **named)  # type: ignore[misc]
        if self._rollout_step != self.state.global_step:
            self.rollout_logprobs.clear()
        self._rollout_step = self.state.global_step
        with replaced_generate(model, self._generate_keyed):
            return super()._generate_single_turn(*given, **named)  # type: ignore[misc]

    def _generate_keyed(self, generate: Any, generation_config: Any, **inputs: Any) -> Tensor:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        first = self._requests + REQUESTS_PER_RANK * self.accelerator.process_index
        self._requests += len(ids)
        draws = RecordedSampling(
            self.args.seed,
            self.args.temperature,
            self.args.top_k or None,
            self.args.top_p,
            range(first, first + len(ids)),
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
        if plain is self.accelerator.unwrap_model(self.model):
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


def refuse_policies(args: Any) -> None:
    """Raise for options under which the policy that samples is not the one that is scored."""
    asked: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "min_p": (getattr(args, "min_p", None), (None, 0.0)),
        "repetition_penalty": (getattr(args, "repetition_penalty", 1.0), (None, 1.0)),
        "use_liger_kernel": (getattr(args, "use_liger_kernel", False), (False,)),
        "use_transformers_continuous_batching": (
            getattr(args, "use_transformers_continuous_batching", False),
            (False,),
        ),
        "generation_kwargs": (getattr(args, "generation_kwargs", None), (None, {})),
    }
    for name, (value, allowed) in asked.items():
        if value not in allowed:
            raise UnsupportedError(
                expected=f"{name}={allowed[0]}: a policy of temperature, top_k and top_p",
                received=f"{name}={value}",
                remedy="leave it out; its effect on log-probabilities is not scored",
            )


def refuse_images(compute_aux_loss: bool, images: dict[str, Any]) -> None:
    """Raise for what an enabled model does not compute."""
    given = [name for name, value in images.items() if value is not None]
    if compute_aux_loss or given:
        raise UnsupportedError(
            expected="text alone, and a dense model",
            received=f"{given}, auxiliary loss {compute_aux_loss}",
            remedy="use TRL's own trainer for images and mixtures of experts",
        )


if TYPE_CHECKING:
    GRPOTrainer = Any


def __getattr__(name: str) -> Any:
    """Return `GRPOTrainer`: TRL's with `OrderedGRPO` mixed in. TRL is imported here and not before."""
    if name != "GRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from trl import GRPOTrainer as Stock  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnsupportedError(
            expected="TRL",
            received=f"{error}",
            remedy="pip install trl datasets; tested with 1.16",
        ) from error
    made = type(
        "GRPOTrainer",
        (OrderedGRPO, Stock),
        {"__doc__": OrderedGRPO.__doc__, "__module__": __name__},
    )
    globals()["GRPOTrainer"] = made
    return made
