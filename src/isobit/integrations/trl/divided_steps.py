"""Steps of a TRL trainer that are divided over ranks and micro-batches: gradients are summed by isobit.parallel.

[Note: why not by DDP] DDP exchanges gradients after a call of its own forward. Scores are taken from the model inside
of it, so DDP would exchange nothing, and every rank would train a model of its own. `Gradients` sums over
micro-batches and ranks in the order of the samples, as in OrderedTrainer. TRL generates and scores inside of
training_step, of more rows than a micro-batch has, so the micro-batch is opened where the loss is computed, and closed
behind the backward.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from isobit.errors import ArgumentError, CutError, UnsupportedError
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.gradients import Gradients


class DividedSteps:
    """Mix in before a trainer of TRL whose loss takes its scores from isobit. See [Note: why not by DDP]."""

    # names of TRL's trainer
    accelerator: Any
    args: Any
    current_gradient_accumulation_steps: int

    _batch: GlobalBatch | None = None  # None: one micro-batch on one rank, as autograd sums it
    _gradients: Gradients | None = None
    _micro = 0
    _step_stack: ExitStack | None = None  # of the training step that runs

    def divide_steps(self) -> None:
        """Choose how the samples of a step are divided."""
        self._batch = division_of(self.args, self.accelerator)

    def train(self, *given: Any, **named: Any) -> Any:
        """Train as TRL does."""
        try:
            return super().train(*given, **named)  # type: ignore[misc]
        finally:
            self._micro = 0
            if self._gradients is not None:
                self._gradients.close()
                self._gradients = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run forward and backward of one micro-batch."""
        batch = self._batch
        if batch is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.current_gradient_accumulation_steps != batch.micro_batches:
            raise ArgumentError(
                expected=f"{batch.micro_batches} micro-batches in every step",
                received=f"{self.current_gradient_accumulation_steps} at the end of the data",
                remedy="pass max_steps, or a number of prompts that fills each step",
            )
        if self._gradients is None:
            self._gradients = Gradients(self.accelerator.unwrap_model(model), batch)
        with ExitStack() as stack:
            self._step_stack = stack
            try:
                loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            except BaseException:
                self._micro = 0
                raise
            finally:
                self._step_stack = None
        self._micro = (self._micro + 1) % batch.micro_batches
        return loss * batch.ranks  # for the log, which takes the mean over ranks

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Return TRL's loss; in a divided step without the factor for a mean over ranks, as gradients are summed."""
        if self._batch is None or self._gradients is None or self._step_stack is None:
            return super().compute_loss(model, inputs, *given, **named)  # type: ignore[misc]
        rows = len(inputs["completion_ids"])
        if rows != self._batch.size:
            raise ArgumentError(
                expected=f"{self._batch.size} completions in every micro-batch",
                received=f"{rows}",
                remedy="pass a number of prompts that fills each step",
            )
        self._step_stack.enter_context(self._gradients.micro_batch(self._micro))
        loss = super().compute_loss(model, inputs, *given, **named)  # type: ignore[misc]
        return loss / self._batch.ranks  # a power of two: exact


def division_of(args: Any, accelerator: Any) -> GlobalBatch | None:
    """Return how the samples of a step are divided; None for one micro-batch on one rank.

    On one rank, what `Gradients` cannot divide is summed by autograd: the result is right, and depends on the number of
    micro-batches, of which a warning tells. On several ranks it is refused: nothing would be exchanged.

    Raises:
        UnsupportedError: On several ranks, for options under which others sum the gradients.
        CutError: The step cannot be divided over these ranks.
    """
    ranks, micro_batches = accelerator.num_processes, args.gradient_accumulation_steps
    mixed = accelerator.mixed_precision not in (None, "no")
    if ranks > 1:
        refuse_wrappers(args, accelerator)
    elif micro_batches == 1 or mixed:
        return None
    total = args.per_device_train_batch_size * micro_batches * ranks
    try:
        return GlobalBatch(total=total, ranks=ranks, micro_batches=micro_batches)
    except CutError:
        if ranks > 1:
            raise
        return None


def refuse_wrappers(args: Any, accelerator: Any) -> None:
    """Raise for options of several ranks under which gradients are summed or scaled by others."""
    wrong = {
        "deepspeed": getattr(args, "deepspeed", None),
        "fsdp": getattr(args, "fsdp", None),
        "mixed precision": {None: "", "no": ""}.get(
            accelerator.mixed_precision, accelerator.mixed_precision
        ),
    }
    for name, value in wrong.items():
        if value:
            raise UnsupportedError(
                expected="over several ranks, an option that leaves the sum over samples to isobit.parallel.Gradients",
                received=f"{name}: {value}",
                remedy="leave it out; for bf16 load the model with from_pretrained(..., dtype=torch.bfloat16) and pass "
                "bf16=False",
            )
