"""An elastic torchrun script: it continues from the last checkpoint after a restart, and stops for a signal."""

import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    """Trains, saves snapshots and continues from one."""

    def __init__(self, model, loader, optimizer, path, gpu_id):
        self.gpu_id, self.loader, self.optimizer, self.path = gpu_id, loader, optimizer, path
        self.model, self.epochs_run = model.to(gpu_id), 0
        if os.path.exists(path):
            snapshot = torch.load(path, map_location=gpu_id, weights_only=True)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(self.model, device_ids=None if gpu_id == "cpu" else [gpu_id])

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                source, targets = source.to(self.gpu_id), targets.to(self.gpu_id)
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(source), targets)
                loss.backward()
                self.optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            dist.barrier()  # everybody has loaded before rank 0 writes
            if dist.get_rank() == 0:
                print(f"Epoch {epoch} loss {total.item() / dist.get_world_size():.5f}")
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.path)


@record
def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gpu_id = int(os.environ["LOCAL_RANK"]) if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu_id != "cpu" else "gloo")
    if gpu_id != "cpu":
        torch.cuda.set_device(gpu_id)
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, f"snapshot-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    size = 4 * dist.get_world_size()
    data = TensorDataset(torch.randn(size, 20), torch.randn(size, 1))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    model = nn.Linear(20, 1)
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.05), path, gpu_id)
    trainer.train(2 + restarts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
