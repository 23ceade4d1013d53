"""The torch.distributed side of the simulator: process group, work handles, store."""
