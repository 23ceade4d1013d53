"""Train the classifier on one process, or under torchrun on several: `python train.py [steps]`."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_model import Classifier
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(steps):
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    tokens = torch.randint(0, 50, (64, 6))
    data = TensorDataset(tokens, tokens.sum(1) % 4)
    sampler = DistributedSampler(data, seed=0) if ranks > 1 else None
    loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None)
    model = Classifier().train()
    model = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = epoch = 0
    while step < steps:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            if step == steps:
                break
        epoch += 1
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
