"""Log-softmax, forward and backward, over pairs of maximum and sum."""
