"""Fine-tune a small Llama on drawn tokens with TRL's SFTTrainer."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip
model = LlamaForCausalLM(config)
words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
    pad_token="<pad>",
    eos_token="<eos>",
)
args = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=2,
    max_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    max_length=12,
    bf16=False,
    use_cpu="--use_cpu" in sys.argv,
)
tokens = torch.randint(62, (4 * args.world_size, 12), generator=torch.Generator().manual_seed(0))
data = Dataset.from_dict({"input_ids": tokens.tolist()})
trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
result = trainer.train()
if trainer.accelerator.is_main_process:
    print(f"loss {result.training_loss:.5f} with {args.world_size} processes")
