"""One sum over ranks: the order of addition carried out over torch.distributed."""
