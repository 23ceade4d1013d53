"""Find out why TRL's GRPO trainer computes other log-probabilities than generate() did.

Trains a tiny Qwen3 for three steps, prints how far the trainer's log-probabilities are from those of the rollout, then
audits the batch that the trainer saw and prints which operators explain the difference. Writes audit_trl_grpo.html.

Needs TRL: `pip install trl datasets`.
"""

import contextlib
import io

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import isobit

WORDS, STEPS, NEW = 29, 3, 12
PAD, END = WORDS, WORDS + 1


def build_tokenizer():
    words = {f"t{i}": i for i in range(WORDS)} | {"<pad>": PAD, "<eos>": END, "<unk>": END + 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build_model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS + 3,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


class WatchedTrainer(GRPOTrainer):
    """Keeps what rollout and trainer computed, and the batch and weights of the step where they differ most."""

    def watch(self):
        self.differences = []
        generate = self.model.generate

        def recorded(*given, **named):
            made = generate(*given, **named, output_logits=True, return_dict_in_generate=True)
            self.rolled = log_probs_of_rows(made)
            return made.sequences

        self.model.generate = recorded
        return self

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *given, **named
    ):
        found = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *given, **named
        )
        masks = attention_mask.bool()
        rolled = [
            self.rolled[tuple(row[m].tolist())] for row, m in zip(input_ids, masks, strict=True)
        ]
        scored, rolled = found[0].detach()[masks[:, -logits_to_keep:]], torch.cat(rolled)
        difference = scored - rolled
        largest = max((d.abs().max() for d in self.differences), default=-1)
        if difference.abs().max() > largest:
            self.batch = {"input_ids": input_ids, "attention_mask": attention_mask}
            self.new = logits_to_keep
            self.weights = {name: w.detach().clone() for name, w in model.state_dict().items()}
            self.worst = scored, rolled
        self.differences.append(difference)
        return found


def log_probs_of_rows(made):
    """Return the log-probabilities of the tokens that generate() drew, by the tokens of the row without padding."""
    width = made.sequences.shape[1] - len(made.logits)
    every = torch.stack(made.logits, dim=1).float().log_softmax(-1)  # [B, NEW, V]
    rows = {}
    for row, log_probs in zip(made.sequences, every, strict=True):
        prompt, drawn = row[:width], row[width:]
        ends = (drawn == END).nonzero().flatten().tolist()
        drawn = drawn[: ends[0] + 1] if ends else drawn
        whole = torch.cat((prompt[prompt != PAD], drawn))
        rows[tuple(whole.tolist())] = log_probs[torch.arange(len(drawn)), drawn]
    return rows


def describe(difference):
    worst, k3 = difference.abs().max(), (difference.exp() - 1 - difference).mean()
    return (
        f"{int((difference != 0).sum())} of {len(difference)} log-probabilities differ, "
        f"largest {worst:.1e}, mean(e^d − 1 − d) {k3:.1e}"
    )


def train():
    prompts = [" ".join(f"t{(7 * i + j) % WORDS}" for j in range(3 + i % 5)) for i in range(32)]
    options = GRPOConfig(
        output_dir="trl_output",
        per_device_train_batch_size=8,
        num_generations=2,
        max_completion_length=NEW,
        max_steps=STEPS,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = WatchedTrainer(
        model=build_model(),
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        args=options,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(),
    ).watch()
    with contextlib.redirect_stdout(io.StringIO()):  # TRL prints its own metrics
        trainer.train()
    return trainer


def split_difference(trainer, model):
    """Return what makes the difference, in three parts that add up to it.

    The trainer scores with TRL's own head, and without positions, so those of a row that is padded on the left are
    counted from the padding on. generate() counts from the first token, and decodes with a cache.
    """
    ids, mask = trainer.batch["input_ids"], trainer.batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as generate() counts them
    tokens, kept = ids[:, -trainer.new :], mask[:, -trainer.new :].bool()

    def select(logits):
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0][kept]

    with torch.no_grad():
        plain = model(**trainer.batch).logits[:, -trainer.new - 1 : -1]
        counted = model(**trainer.batch, position_ids=positions).logits[:, -trainer.new - 1 : -1]
        cached = decode(model, ids, mask, positions, ids.shape[1] - trainer.new)
    plain, counted, cached = select(plain), select(counted), select(cached)
    scored, rolled = trainer.worst
    assert torch.equal(cached, rolled), "decoding again must give the bits of the rollout"
    return {
        "TRL's head": scored - plain,
        "positions of padded rows": plain - counted,
        "decoding with a cache": counted - cached,
    }


def decode(model, ids, mask, positions, prompt):
    """Return logits [B, NEW, V] as generate() computes them: the prompt, then one token per call."""
    found, cache, start = [], None, 0
    for end in range(prompt, ids.shape[1]):
        out = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        found, cache, start = [*found, out.logits[:, -1]], out.past_key_values, end
    return torch.stack(found, dim=1)


def main():
    trainer = train()
    for step, difference in enumerate(trainer.differences):
        print(f"step {step}: {describe(difference)}")
    model = build_model().eval()
    model.load_state_dict(trainer.weights)
    print("\nThe step with the largest difference, in parts:")
    for part, difference in split_difference(trainer, model).items():
        print(f"  {part}: {describe(difference)}")
    # Rows that ended early are padded on the right and cannot be decoded together with the others.
    whole = trainer.batch["attention_mask"][:, -1].bool()
    batch = {name: tensor[whole] for name, tensor in trainer.batch.items()}
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    report = isobit.audit(model, batch, vary=("batch", "padding", "decode"))
    print(f"\nAudit of the {int(whole.sum())} rows that were generated to the end.")
    print("\nWhich operators make them:")
    for axis in report.axes:
        print(
            f"{axis.axis} ({axis.variation}): {len(axis.guilty)} of {axis.judged} operators depend on it"
        )
        for guilty in axis.guilty[:3]:
            print(
                f"  {guilty.share or 0:4.0%} {guilty.place}, {guilty.kind}, {guilty.place.source}"
            )
        effect = axis.effect
        if effect is not None:
            print(
                f"  effect: {effect.differ} of {effect.numbers} differ, largest {effect.largest:.1e}"
            )
        print(f"  with all of them substituted nothing differs: {axis.complete}")
    report.save("audit_trl_grpo.html")


if __name__ == "__main__":
    main()
