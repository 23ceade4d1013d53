"""Log-softmax and its gradient."""
