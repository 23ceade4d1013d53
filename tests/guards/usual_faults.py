"""Faults planted in the usual scripts: what is changed, and the rule that names it, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "usual_scripts"
NEEDS = {
    "lightning_trainer": "lightning",
    "trl_sft": "trl",
}  # which the development tools do not install


@dataclass(frozen=True)
class Fault:
    """A fault of one script.

    Attributes:
        script: The script, without its suffix.
        name: What is wrong.
        old: The text that is replaced.
        new: What replaces it.
        rule: The rule that names it.
        ranks: The numbers of ranks on which it is a fault; some need two.
        steps: Steps that show it.
        config: The configuration of the run.
    """

    script: str
    name: str
    old: str
    new: str
    rule: str
    ranks: tuple[int, ...] = (1, 2)
    steps: int = 3
    config: dict[str, object] | None = None

    def plant(self) -> str:
        """Return the text of the script with the fault."""
        text = (SCRIPTS / f"{self.script}.py").read_text()
        assert text.count(self.old) == 1, (self.script, self.name)
        return text.replace(self.old, self.new)


ZERO = "optimizer.zero_grad(set_to_none=True)"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
LATE = f"{CLIP}\n                optimizer.step()"
EARLY = f"optimizer.step()\n                {CLIP}"
LABELS = "x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)"
FAULTS = [
    Fault("ddp_loop", "no zero_grad", ZERO, "pass", "not-zeroed"),
    Fault("ddp_loop", "no set_epoch", "sampler.set_epoch(epoch)", "pass", "epochs-alike", steps=12),
    Fault("ddp_loop", "eval mode", "model.train()", "model.eval()", "trained-in-eval-mode"),
    Fault("ddp_loop", "clips after the step", LATE, EARLY, "clipped-after-step"),
    Fault(
        "ddp_loop",
        "loss not divided",
        "model(x), y) / ACCUMULATION",
        "model(x), y)",
        "loss-not-divided",
    ),
    Fault(
        "ddp_loop",
        "head in no optimizer",
        "AdamW(model.parameters(), lr",
        "AdamW(model.module[:4].parameters(), lr",
        "not-in-optimizer",
    ),
    Fault(
        "ddp_loop",
        "inner module called",
        "cross_entropy(model(x)",
        "cross_entropy(model.module(x)",
        "gradients-differ",
        (2,),
    ),
    Fault(
        "ddp_loop",
        "one shard for all ranks",
        "DistributedSampler(dataset, shuffle=True)",
        "DistributedSampler(dataset, 2, 0, shuffle=True)",
        "data-alike",
        (2,),
    ),
    Fault("ddp_loop", "rate of 0", "min(1.0, (step + 1) / 4)", "0.0", "rate-zero"),
    Fault("ddp_loop", "labels all ignored", LABELS, f"{LABELS}; y.fill_(-100)", "no-targets"),
    Fault(
        "ddp_loop",
        "two optimizers",
        "scheduler.step()",
        "scheduler.step(); torch.optim.SGD(model.parameters(), lr=1e-3).step()",
        "stepped-twice",
    ),
    Fault(
        "ddp_loop",
        "collective on one rank",
        "scheduler.step()",
        "scheduler.step(); rank == 0 and dist.all_reduce(loss.detach())",
        "mismatch",
        (2,),
    ),
    Fault("fsdp2_loop", "no zero_grad", ZERO, "pass", "not-zeroed"),
    Fault("fsdp2_loop", "clips after the step", LATE, EARLY, "clipped-after-step"),
    Fault(
        "fsdp2_loop",
        "loss not divided",
        ".float(), y) / ACCUMULATION",
        ".float(), y)",
        "loss-not-divided",
    ),
    Fault(
        "fsdp2_loop",
        "labels all ignored",
        "y.cuda()",
        "torch.full_like(y, -100).cuda()",
        "no-targets",
    ),
    Fault(
        "fsdp2_loop",
        "one shard for all ranks",
        "DistributedSampler(dataset, size, rank, ",
        "DistributedSampler(dataset, size, 0, ",
        "data-alike",
        (2,),
    ),
    Fault(
        "hf_trainer",
        "labels all ignored",
        '"labels": row}',
        '"labels": torch.full_like(row, -100)}',
        "no-targets",
    ),
    Fault(
        "hf_trainer",
        "beta2 by default",
        "adam_beta2=0.95,",
        "",
        "hyperparameter",
        config={"adam_beta2": 0.95},
    ),
    Fault(
        "hf_trainer",
        "weights frozen",
        "    tokens = ",
        "    [p.requires_grad_(p.ndim < 2) for p in model.parameters()]\n    tokens = ",
        "weights-frozen",
    ),
    Fault("accelerate_loop", "no zero_grad", "optimizer.zero_grad()", "pass", "not-zeroed"),
    Fault("accelerate_loop", "rate of 0", "1 - step / 100", "0.0", "rate-zero"),
    Fault(
        "accelerate_loop",
        "model not prepared",
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
        "optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)",
        "gradients-differ",
        (2,),
    ),
    Fault(
        "lightning_trainer",
        "head in no optimizer",
        "AdamW(self.parameters()",
        "AdamW(self.model[0].parameters()",
        "not-in-optimizer",
        (1,),
    ),
    Fault("lightning_trainer", "rate of 0", "lr=1e-2", "lr=0.0", "rate-zero"),
    Fault("trl_sft", "rate of 0", "learning_rate=1e-3", "learning_rate=0.0", "rate-zero"),
    Fault(
        "trl_sft",
        "batch size",
        "per_device_train_batch_size=4",
        "per_device_train_batch_size=2",
        "count",
        config={"per_device_train_batch_size": 4},
    ),
]
