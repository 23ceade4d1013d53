"""RMSNorm, its gradients, and norms of heads that are cut over ranks."""
