"""Log-probabilities of chosen tokens from hidden states, and the loss of a language model."""
