"""Train with Accelerate, after its example of text classification: accumulation, a schedule, metrics of all ranks."""

import argparse

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def training_function(config, args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    set_seed(config["seed"])
    size = accelerator.num_processes * 8
    with accelerator.main_process_first():
        data = TensorDataset(torch.randn(size, 8), torch.randint(0, 3, (size,)))
    train = DataLoader(data, shuffle=True, batch_size=2, drop_last=True)
    evaluation = DataLoader(data, shuffle=False, batch_size=4)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, train, evaluation, schedule = accelerator.prepare(
        model, optimizer, train, evaluation, schedule
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = torch.zeros((), device=accelerator.device)
        for x, y in evaluation:
            with torch.no_grad():
                predictions = model(x).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, y))
            right += (predictions == references).sum()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.5f} right {int(right)} of {size}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    args, _ = parser.parse_known_args()
    training_function({"lr": 2e-2, "num_epochs": 2, "seed": 42}, args)


if __name__ == "__main__":
    main()
