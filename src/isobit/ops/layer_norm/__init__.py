"""LayerNorm and its gradients."""
