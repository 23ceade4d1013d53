"""What a simulated program uses of torch.distributed: process groups, work handles, the store."""
