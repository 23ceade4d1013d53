"""Train a small convolutional net with DDP, after PyTorch's ImageNet example: meters, schedule, checkpoint, top-1."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Training on images drawn at random")
parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("-b", "--batch-size", type=int, default=2)


class AverageMeter:
    """Computes and stores the average over all ranks."""

    def __init__(self, device):
        self.device, self.total, self.count = device, 0.0, 0

    def update(self, value, n):
        self.total += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.total, self.count], dtype=torch.float32, device=self.device)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.total, self.count = total.tolist()
        return self.total / self.count


def main():
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if gpu:
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        device = torch.device(f"cuda:{local}")
    else:
        device = torch.device("cpu")
    torch.manual_seed(0)
    count = args.batch_size * world_size * 2
    data = TensorDataset(torch.randn(count, 3, 8, 8), torch.randint(0, 4, (count,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=0, pin_memory=gpu)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
    ).to(device)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local] if gpu else None)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(ddp.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        losses, top1 = AverageMeter(device), AverageMeter(device)
        for images, target in loader:
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = ddp(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update((output.argmax(1) == target).float().mean().item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        mean, accuracy = losses.all_reduce(), top1.all_reduce()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.5f} acc {accuracy:.3f}")
            torch.save({"epoch": epoch, "model": ddp.state_dict()}, f"{args.folder}/imagenet.pt")
    dist.barrier()
    saved = torch.load(f"{args.folder}/imagenet.pt", map_location=device, weights_only=True)
    ddp.load_state_dict(saved["model"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
