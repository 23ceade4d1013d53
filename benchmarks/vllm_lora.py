"""TRL's GRPO with LoRA in bf16, rollouts by vLLM with merged weights: isobit, two controls, and the bits of the base.

Needs ./setup_vllm, and `pip install -c constraints.txt datasets trl`. The controls are stock vLLM under isobit's
trainer, and stock on both sides: TRL's trainer, whose adapters PEFT merges into the base before each rollout and takes
out again, as `trl/generation/vllm_generation.py` does. TRL's own transport of weights needs NCCL; here they travel as
they do for isobit.
"""

import copy
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.vllm import PYTHON
from isobit.bits import as_integers
from isobit.integrations.vllm import Rollouts

STEPS = 20
# The engine and the trainer of each run.
RUNS = {
    "isobit": ("isobit", "isobit"),
    "isobit, stock vLLM": ("stock", "isobit"),
    "stock": ("stock", "stock"),
}


class Measured:
    """Compare log-probabilities of a trainer with those of its rollout, at every step."""

    rollout_logprobs: dict

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *given, **named):
        found = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, *given, **named
        )
        pairs = []
        for row, mask, values in zip(input_ids, attention_mask, found[0].detach(), strict=True):
            known = self.rollout_logprobs[tuple(row[mask.bool()].tolist())]
            pairs.append((values[: len(known)].float(), known))
        ours, theirs = (torch.cat(column) for column in zip(*pairs, strict=True))
        wrong = as_integers(ours.contiguous()) != as_integers(theirs.contiguous())
        self.steps.append((int(wrong.sum()), (ours - theirs).double()))
        return found


class WithVllm:
    """TRL's trainer, stock, with rollouts by vLLM; PEFT merges for it, and unmerges, as TRL asks it to."""

    def __init__(self, *given, rollouts, **named):
        super().__init__(*given, **named)
        self.rollouts, self.rollout_logprobs, self.requests = rollouts, {}, 0

    def _generate_single_turn(self, prompt_ids, *_, **__):
        model = self.accelerator.unwrap_model(self.model)
        self.rollouts.update_weights(merged_by_peft(model))
        requests = range(self.requests, self.requests + len(prompt_ids))
        self.requests += len(prompt_ids)
        made = self.rollouts.generate(
            prompt_ids,
            seed=self.args.seed,
            requests=requests,
            max_tokens=self.max_completion_length,
            ends=self.eos_token_ids,
        )
        for prompt, (tokens, values) in zip(prompt_ids, made, strict=True):
            self.rollout_logprobs[(*prompt, *tokens)] = torch.tensor(values)
        return [one.tokens for one in made], None


def merged_by_peft(model):
    """Return a plain model with the weights that PEFT merges in place, and unmerge them."""
    model.merge_adapter()
    base = model.get_base_model()
    plain = type(base)(copy.deepcopy(base.config)).to(base.dtype)
    merged = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in model.state_dict().items()
        if "lora_" not in name
    }
    plain.load_state_dict(merged)
    model.unmerge_adapter()
    for name, buffer in base.named_buffers():  # fp32, as from_pretrained leaves them
        owner, _, key = name.rpartition(".")
        plain.get_submodule(owner)._buffers[key] = buffer
    return plain


def base_of(model):
    """Return copies of the weights that are no adapter's."""
    named = model.named_parameters()
    return {name: value.detach().clone() for name, value in named if "lora_" not in name}


def train(name, steps=STEPS):
    """Return of one run, by step, how many differ and the differences; weights of the base that changed; rewards."""
    import trl

    from isobit.integrations.trl import GRPOTrainer
    from tests.integrations.test_trl import build_model, trainer_of

    engine, trainer = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        build_model(torch.bfloat16).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        kinds = (
            (Measured, GRPOTrainer)
            if trainer == "isobit"
            else (Measured, WithVllm, trl.GRPOTrainer)
        )
        if trainer == "isobit":
            isobit.enable(model, adapters="merged")
        before = base_of(model)
        options = {"max_steps": steps, "logging_steps": 1, "learning_rate": 1e-3}
        with Rollouts(model, PYTHON, max_model_len=64, engine=engine) as rollouts:
            made = trainer_of(
                type("Trainer", kinds, {"steps": []}), model, Path(folder), rollouts, **options
            )
            with redirect_stdout(sys.stderr):  # its log
                made.train()
    after = base_of(model)
    changed = sum(int((after[key] != value).sum()) for key, value in before.items())
    rewards = [row["reward"] for row in made.state.log_history if "reward" in row]
    return made.steps, changed, sum(map(torch.numel, before.values())), rewards


def describe(found):
    """Return the measures of one run in words."""
    steps, changed, weights, rewards = found
    wrong, apart = zip(*steps, strict=True)
    kls = [float((torch.expm1(one) - one).mean()) for one in apart]
    return {
        "steps whose KL is exactly 0": f"{sum(kl == 0 for kl in kls)} of {len(kls)}",
        "largest KL of a step": f"{max(kls):.3g}",
        "log-probabilities that differ": f"{sum(wrong):,} of {sum(map(len, apart)):,}",
        "by up to": f"{max(float(one.abs().max()) for one in apart):.3g}",
        "weights of the base that changed": f"{changed:,} of {weights:,}",
        "reward, first and last step": f"{rewards[0]:.2f}, {rewards[-1]:.2f}",
    }


def run(quick, threads, dtypes):
    """Print a column per run."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    columns, failed = {}, False
    for name in RUNS:
        found = train(name, 3 if quick else STEPS)
        columns[name] = describe(found)
        differ = sum(wrong for wrong, _ in found[0])
        compared = sum(len(apart) for _, apart in found[0])
        failed |= name == "isobit" and (differ > 0 or found[1] > 0 or not compared)
        sys.stderr.write(f"{name}: {differ} of {compared} differ\n")
    table = Table(f"GRPO with LoRA and vLLM, {STEPS} steps, bf16", *columns)
    for measure in columns["isobit"]:
        table.add_row(measure, *(column[measure] for column in columns.values()))
    Console(width=120, highlight=False).print(table)
    return int(failed)
