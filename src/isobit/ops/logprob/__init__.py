"""Log-probabilities of chosen tokens from hidden states, without the logits; and the loss made of them."""
