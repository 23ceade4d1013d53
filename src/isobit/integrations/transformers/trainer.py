"""transformers' Trainer whose result does not depend on micro-batches or data-parallel ranks.

[Note: how the Trainer's step is divided] A global batch has per_device_train_batch_size × gradient_accumulation_steps ×
ranks samples. Each rank has consecutive samples of it, in consecutive micro-batches (GlobalBatchSampler), and each
training_step runs inside `isobit.parallel.Gradients.micro_batch`. So the weights after a step depend on the samples of
the global batch and their order alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from isobit.errors import ArgumentError, UnsupportedError
from isobit.foundation.files import digest_files, first_damaged, write_text
from isobit.guards.live.watching import Resume, Watch, watch
from isobit.integrations.transformers.state import require_state
from isobit.order.plan import VERSION
from isobit.parallel.data.global_batch import GlobalBatch, GlobalBatchSampler
from isobit.parallel.data.grad_norm import clip_grad_norm_
from isobit.parallel.data.gradients import Gradients
from isobit.sampling.dropout import dropout_key

# Written last into a checkpoint folder. transformers writes the other files one after another, and resumes without
# a word from a folder that has weights and no optimizer.
RECORD = "isobit.json"
LOADED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "optimizer.*",
    "scheduler.pt",
    "trainer_state.json",
)


class EpochLoader(DataLoader[Any]):
    """A DataLoader that passes the epoch on to its batch sampler, as the Trainer sets it."""

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch."""
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


class OrderedTrainer(Trainer):
    """A transformers Trainer with one result for every number of micro-batches and ranks.

    With N samples per step, per_device_train_batch_size × gradient_accumulation_steps × ranks = N in any way gives the
    same weights, bit for bit. The model must be enabled; use `optim="adamw_torch"`, and a collator that pads as it
    likes. Labels must be given: the loss is divided by their number in the global batch.

    Args:
        *given: As for transformers.Trainer.
        **named: As for transformers.Trainer.

    Raises:
        UnsupportedError: If the model is not enabled, or an option is set that changes how gradients are summed.
        CutError: If the global batch cannot be divided so.

    Example:
        >>> from isobit.integrations.transformers import OrderedTrainer
        >>> trainer = OrderedTrainer(isobit.enable(model), arguments, train_dataset=data)  # doctest: +SKIP
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create the Trainer, and check model and options."""
        super().__init__(*given, **named)
        require_state(self.accelerator.unwrap_model(self.model))
        refuse_options(self.args)
        self._gradients: Gradients | None = None
        self._micro = 0

    @property
    def global_batch(self) -> GlobalBatch:
        """How a step's samples are divided over ranks and micro-batches."""
        args = self.args
        count = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return GlobalBatch(
            total=count * args.world_size,
            ranks=args.world_size,
            micro_batches=args.gradient_accumulation_steps,
        )

    @property
    def samples_of_a_step(self) -> GlobalBatch:
        """How the samples that the model sees in a step are divided: one for each item of the dataset."""
        return self.global_batch

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches; it is not divided over ranks again."""
        if self.train_dataset is None or not hasattr(self.train_dataset, "__len__"):
            raise ArgumentError(
                expected="a train_dataset with a length",
                received=type(self.train_dataset).__name__,
                remedy="use a map-style dataset: global batches are runs of its shuffled order",
            )
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler = GlobalBatchSampler(
            len(self.train_dataset),
            self.global_batch,
            args.process_index,
            seed=seed,
            drop_last=args.dataloader_drop_last,
        )
        collate = self._get_collator_with_removed_columns(self.data_collator, "Training")
        return EpochLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=False,
        )

    def train(self, *given: Any, **named: Any) -> Any:
        """Train as transformers does."""
        try:
            return super().train(*given, **named)
        finally:
            self._micro = 0
            if self._gradients is not None:
                self._gradients.close()
                self._gradients = None

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch."""
        batch = self.samples_of_a_step
        rows = len(next(iter(inputs.values())))
        if rows != batch.size or self.current_gradient_accumulation_steps != batch.micro_batches:
            raise ArgumentError(
                expected=f"{batch.micro_batches} micro-batches of {batch.size} samples in every step",
                received=f"{self.current_gradient_accumulation_steps} of {rows}",
                remedy="pass dataloader_drop_last=True, so that each step has a whole global batch",
            )
        # The model itself, without DDP around it: Gradients exchanges what DDP would, and can take tied weights.
        model = self.accelerator.unwrap_model(model)
        if self._gradients is None:
            self._gradients = Gradients(model, batch)
        micro, self._micro = self._micro, 0
        # Masks of dropout belong to a sample of a step, wherever it is computed, and also after a resumption.
        key = dropout_key(self.args.seed, self.state.global_step)
        with self._gradients.micro_batch(micro), key:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._micro = (micro + 1) % batch.micro_batches
        return loss * batch.ranks  # for the log, which takes the mean over ranks

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the Trainer's loss without its factor for DDP's mean over ranks: gradients are summed here."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ranks = self.accelerator.num_processes
        if ranks == 1 or num_items_in_batch is None or not model.training:
            return found
        loss, *outputs = found if return_outputs else (found,)
        loss = loss / ranks  # a power of two: exact
        return (loss, *outputs) if return_outputs else loss

    def _resumable(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the run that saved, besides weights and optimizer."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return {
            "order": VERSION,
            "samples of a global batch": self.global_batch.total,
            "seed of the data": seed,
            "samples of the dataset": len(self.train_dataset),  # type: ignore[arg-type]
        }

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as transformers does, then write the record that makes the checkpoint complete."""
        name = f"checkpoint-{self.state.global_step}"
        folder = Path(self._get_output_dir(trial=trial)) / name
        if self.args.should_save:
            (folder / RECORD).unlink(missing_ok=True)  # of a run that saved this step before
        super()._save_checkpoint(model, trial)
        if self.args.should_save and not self.args.save_only_model and folder.is_dir():
            write_record(folder, self._resumable())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check the checkpoint before anything of it is loaded."""
        check_resumable(Path(resume_from_checkpoint), self._resumable())
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        plain = self.accelerator.unwrap_model(model)
        return clip_grad_norm_(plain, self.args.max_grad_norm)


def refuse_options(args: Any) -> None:
    """Raise for options that change how gradients are summed or scaled."""
    wrong = {
        "fp16": args.fp16,
        "bf16 (autocast)": args.bf16,
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "group_by_length": getattr(args, "group_by_length", False),
        "label_smoothing_factor": args.label_smoothing_factor,
    }
    for name, value in wrong.items():
        if value:
            raise UnsupportedError(
                expected="an option that leaves the sum over samples to isobit.parallel.Gradients",
                received=f"{name}: {value}",
                remedy="leave it out, or pass bf16=False where a configuration of TRL sets it; for bf16 load the model "
                "with from_pretrained(..., dtype=torch.bfloat16)",
            )


def write_record(folder: Path, facts: dict[str, Any]) -> None:
    """Write what a resumed run must have in common with this one, and digests of the files that it loads."""
    names = sorted(path.name for pattern in LOADED for path in folder.glob(pattern))
    record = {"facts": facts, "files": digest_files(folder, names)}
    write_text(folder / RECORD, json.dumps(record, indent=1))


def check_resumable(folder: Path, facts: dict[str, Any]) -> None:
    """Raise unless a checkpoint is complete, unchanged, and of a run that this one continues bit for bit.

    Raises:
        ArgumentError: It is not.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        saved, files = dict(record["facts"]), dict(record["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        whole = sorted(path.parent.name for path in folder.parent.glob(f"checkpoint-*/{RECORD}"))
        raise ArgumentError(
            expected=f"a complete checkpoint of OrderedTrainer, whose last file is {RECORD}",
            received=f"{folder}: {type(error).__name__}",
            remedy=f"resume from {' or '.join(whole[-3:]) or 'another checkpoint'}; to start a new run from these "
            "weights, pass the folder to from_pretrained",
        ) from error
    if wrong := first_damaged(folder, files, files):
        raise ArgumentError(
            expected="the files that OrderedTrainer saved",
            received=f"{folder}: {wrong}",
            remedy="resume from another checkpoint",
        )
    for name, value in facts.items():
        if saved.get(name) != value:
            raise ArgumentError(
                expected=f"{name}: {saved.get(name)}, as the run that saved {folder.name}",
                received=f"{name}: {value}",
                remedy="choose size × accumulation × ranks, seed and data as that run had them; to start a new run "
                "from its weights, pass the folder to from_pretrained",
            )


# `WatchCallback`: `isobit.guards.watch` for transformers' Trainer.


class WatchCallback(TrainerCallback):
    """Watches a Trainer's run: losses before the Trainer's filter replaces NaN, gradients after clipping, weights.

    Args:
        options: Of `isobit.guards.watch`. `max_norm` is the Trainer's `max_grad_norm` unless given.

    Attributes:
        watch: The watch of the last run; None before it.

    Example:
        >>> from isobit.integrations.transformers import WatchCallback
        >>> callback = WatchCallback(policy="raise")  # Trainer(..., callbacks=[callback])
        >>> callback.watch is None
        True
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Start a watch; one that an exception has left open is ended first."""
        self.on_train_end(args, state, control)
        options = {"max_norm": args.max_grad_norm or None, **self.options}
        options.setdefault("resume", Resume(first_step=state.global_step))
        self.watch = watch(given["model"], given["optimizer"], **options)
        message = miscounted_steps(args, state, given.get("train_dataloader"))
        if message:
            self.watch.report("steps-miscounted", message)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()


def miscounted_steps(args: TrainingArguments, state: TrainerState, loader: Any) -> str:
    """Return a sentence if the Trainer's step count does not match its configuration, or nothing.

    Args:
        args: The configuration.
        state: What the Trainer plans.
        loader: The training batches of this rank; one without a length is not judged.
    """
    try:
        batches = len(loader)
    except TypeError:
        return ""
    accumulated = args.gradient_accumulation_steps
    per_epoch = max(batches // accumulated + bool(batches % accumulated), 1)
    expected = (
        args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    )
    if state.max_steps == expected:
        return ""
    return (
        f"{state.max_steps} steps are planned, and {expected} follow from the configuration: "
        f"{args.num_train_epochs:g} epochs of {batches} batches, {accumulated} per step"
        + (f", max_steps {args.max_steps}" if args.max_steps > 0 else "")
    )
