"""Linear layers, their gradients, packed weights and partial sums."""
