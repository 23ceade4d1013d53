"""A short causal convolution of each channel, within each sample, and its gradients."""
