"""Fine-tune with TRL's SFTTrainer: torchrun --nproc-per-node 2 trl_sft.py."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]


def main():
    set_seed(0)
    # Before the model: it chooses the device of this rank, which .cuda() then uses.
    arguments = SFTConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_steps=6,
        max_length=32,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
    ).cuda()
    draw = torch.Generator().manual_seed(0)
    lines = [
        {
            "prompt": f"w{int(torch.randint(0, 60, (1,), generator=draw))} w{i % 61}",
            "completion": " ".join(
                f"w{word}" for word in torch.randint(0, 61, (3 + i % 5,), generator=draw).tolist()
            ),
        }
        for i in range(64)
    ]
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(lines), processing_class=tokenizer
    )
    trainer.train()


if __name__ == "__main__":
    main()
